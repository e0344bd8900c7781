"""Output: messages on stderr, text and colored lines on a stream.

Names and contents of files may be printed, so that control characters and CI commands in them are made harmless.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

#: A line of output: pieces of text, each with a rich style (empty: none).
Line = list[tuple[str, str]]


def print_line(text: str) -> None:
    """Write one line to stderr in a single write, because several ranks may share the stream."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def print_message(message: str) -> None:
    """Print `mpguard: message` to stderr; control characters are replaced, and `::` commands of CI are disarmed."""
    print("mpguard: " + "\n".join(map(_harmless, message.split("\n"))), file=sys.stderr)


def _harmless(line: str) -> str:
    line = printable(line)
    return f"> {line}" if line.lstrip().startswith("::") else line


def printable(text: str) -> str:
    """Without control characters, which a terminal would obey: a file's text and name are not ours."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def write_lines(lines: Iterable[Line], stream: TextIO | None = None) -> None:
    """Prints lines, in colour where that is wanted, with the same text."""
    stream = sys.stdout if stream is None else stream
    if not use_color(stream):
        write_text("".join("".join(text for text, _ in line) + "\n" for line in lines), stream)
        return
    from rich.text import Text

    shown = rich_console(stream)
    for line in lines:
        shown.print(Text.assemble(*((text, style) for text, style in line)), soft_wrap=True)


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Prints a text as it is: a report for another program has no colours, whatever is asked for."""
    stream = sys.stdout if stream is None else stream
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a file's text may hold what the terminal's encoding cannot
    stream.write(text)


def use_color(stream: TextIO) -> bool:
    """On a terminal, or with FORCE_COLOR; never with NO_COLOR. Both are off where they are empty."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def rich_console(stream: TextIO) -> Console:
    """rich's, for a stream that is coloured."""
    from rich.console import Console

    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    forced = bool(os.environ.get("FORCE_COLOR"))
    return Console(
        file=stream, highlight=False, force_terminal=forced or None, color_system="standard" if forced else "auto"
    )


def enable_line_buffering() -> None:
    """Write whole lines to stdout: torchrun starts workers unbuffered, and lines of several ranks mix in one pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
