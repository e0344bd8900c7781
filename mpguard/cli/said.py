"""What is said on stderr. Names of files and text of theirs may be in it, which are not ours."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Prints a message without control characters; what CI would take for a command at the start of a line is none."""
    print("mpguard: " + "\n".join(map(_harmless, message.split("\n"))), file=sys.stderr)


def _harmless(line: str) -> str:
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    return f"> {line}" if line.lstrip().startswith("::") else line
