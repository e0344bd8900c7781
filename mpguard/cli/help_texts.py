"""Help texts in the width of the terminal that they are printed on."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from mpguard.core.console import columns, wrapped

#: A line in two columns: a command or a name, and what it does.
_IN_COLUMNS = re.compile(r"\s*\S.*?\s{2,}(?=\S)")
#: The least width of a second column; below it, what follows goes under the first one.
_LEAST = 30


class Parser(argparse.ArgumentParser):
    """Prints usage lines and errors in the width of the terminal."""

    def _print_message(self, message: str, file: Any = None) -> None:
        stream = sys.stderr if file is None else file
        width = columns(stream) if message else None
        super()._print_message("\n".join(wrapped(line, 4, width) for line in message.split("\n")), stream)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and epilogs where they fit, as for any output that is no terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fitted(super()._fill_text(text, width, indent), columns())


def fitted(text: str, width: int | None) -> str:
    """Return a text in lines of at most `width` characters: lines in columns are folded, other paragraphs refilled."""
    if width is None or all(len(line) <= width for line in text.splitlines()):
        return text
    return "\n\n".join(_paragraph(each.splitlines(), width) for each in re.split(r"\n[ \t]*\n", text))


def _paragraph(lines: list[str], width: int) -> str:
    if not any(_IN_COLUMNS.match(line) or line.startswith("mpguard ") for line in lines):
        start = re.match(r"\s*", lines[0])
        return wrapped(f"{start[0] if start else ''}{' '.join(line.strip() for line in lines)}", 0, width)
    folded = []
    for line in lines:
        column = _IN_COLUMNS.match(line)
        indent = len(column[0]) if column is not None and len(column[0]) + _LEAST <= width else 4
        folded.append(wrapped(line, indent, width))
    return "\n".join(folded)
