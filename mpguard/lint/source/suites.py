"""Logical lines, and statements cut into their suites, so that a change of one suite needs a parse of it alone."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.source.text import STRING

#: Shorter suites and statements are not cut: each piece that is parsed separately takes some 0.05 ms more.
LEAST = 400

_GAP = r"(?:[ \t]*(?:#[^\n]*)?\n)*([ \t]*)"
#: Brackets, and ends of lines with what follows them up to the next line that is neither blank nor a comment.
_LINE_ENDS = lazy_pattern(rf"(?:{STRING}|#[^\n]*|\\\n)|([()\[\]{{}}])|\n{_GAP}", re.DOTALL)
_FIRST = lazy_pattern(_GAP)
_OPENS = lazy_pattern(r"(?:async[ \t]+)?(?:def|class|if|elif|else|for|while|with|try|except|finally|case)\b")
_HOLE = "_mpguard_hole_"


class LogicalLine(NamedTuple):
    """A logical line, from the start of its first line to after its line end, and its indentation."""

    start: int
    end: int
    indent: str


def logical_lines(text: str) -> list[LogicalLine]:
    """Return the logical lines of a statement, or of a file, without blank lines and comments."""
    found: list[LogicalLine] = []
    depth = 0
    first = _FIRST.match(text)
    assert first is not None, "the pattern matches the empty string"
    start, indent = first.start(1), first.group(1)
    for match in _LINE_ENDS.finditer(text, first.end()):
        if match.lastindex == 1:
            depth += 1 if match.group(1) in "([{" else -1
        elif match.lastindex == 2 and depth == 0:
            found.append(LogicalLine(start, match.start() + 1, indent))
            start, indent = match.start(2), match.group(2)
    if start + len(indent) < len(text) and text[start + len(indent)] != "#":
        found.append(LogicalLine(start, len(text), indent))
    return found


class Mark(NamedTuple):
    """A line in the place of a suite: it begins at `start`, its name at `name`; `end` is after the line."""

    text: str
    start: int
    name: int
    end: int


@dataclasses.dataclass
class Cut:
    """Code that is parsed separately: a statement, or a suite of one.

    start: its offset in the statement. before: the lines that are parsed in front of it. depth: the number of blocks
    that it is in then. holes: the suites that were cut out; `code` has a line for each, which `marks` describes.
    """

    start: int
    before: str = ""
    depth: int = 0
    code: str = ""
    holes: list[Cut] = dataclasses.field(default_factory=list)
    marks: list[Mark] = dataclasses.field(default_factory=list)


def cut_suites(text: str) -> Cut | None:
    """Cut a statement into its suites; None where that saves nothing, or is not possible."""
    if len(text) < 2 * LEAST or _HOLE in text:
        return None
    lines = logical_lines(text)
    if len({character for line in lines for character in line.indent}) != 1:
        return None  # not indented at all, or with tabs here and spaces there
    if any(text.startswith("\\", line.start + len(line.indent)) for line in lines):
        return None  # libcst counts columns after a backslash at a line's start differently in a suite alone
    statement = _Cutter(text, lines).statement()
    return statement if statement.holes else None


class _Cutter:
    """Cuts a statement into its suites."""

    def __init__(self, text: str, lines: list[LogicalLine]) -> None:
        self.text, self.lines = text, lines
        # libcst takes the first indentation of a module as its default, and stores only other ones.
        self.usual = f"if 1:\n{next(line.indent for line in lines if line.indent)}1\n"

    def statement(self) -> Cut:
        statement = Cut(0)
        self._cut(statement, 0, len(self.lines), len(self.text))
        return statement

    def _cut(self, piece: Cut, low: int, high: int, end: int) -> None:
        """Cut some lines, and the comments around them, up to the offset `end`."""
        parts: list[str] = []
        length, last, number = 0, piece.start, low
        while number < high:
            line, below = self.lines[number], number + 1
            while below < high and len(self.lines[below].indent) > len(line.indent):
                below += 1
            stop = self._suite_end(number, below) if below > number + 1 else 0
            if stop - line.end < LEAST or not self._is_cut(line, below):
                number += 1
                continue
            indent, name = self.lines[number + 1].indent, f"{_HOLE}{len(piece.holes)}"
            parts += (self.text[last : line.end], f"{indent}{name}\n")
            start = length + line.end - last
            length = start + len(parts[-1])
            piece.marks.append(Mark(name, start, start + len(indent), length))
            around = f"if 1:\n{line.indent}" if line.indent else ""
            suite = Cut(line.end, f"{self.usual}{around}if 1:\n", 2 if around else 1)
            piece.holes.append(suite)
            self._cut(suite, number + 1, below, stop)
            last, number = stop, below
        piece.code = "".join((*parts, self.text[last:end]))

    def _is_cut(self, line: LogicalLine, below: int) -> bool:
        """True if a suite can be cut: not that of a `match`, nor one that ends the text without a newline."""
        if below == len(self.lines) and not self.text.endswith("\n"):
            return False
        return _OPENS.match(self.text, line.start + len(line.indent)) is not None

    def _suite_end(self, number: int, below: int) -> int:
        """Return the end of a suite, with the comments below that are indented as it is, or deeper."""
        indent, place = self.lines[number + 1].indent, self.lines[below - 1].end
        end, following = place, self.lines[below].start if below < len(self.lines) else len(self.text)
        while place < following and (newline := self.text.find("\n", place, following)) >= 0:
            if self.text.startswith(indent, place):
                end = newline + 1
            place = newline + 1
        return end
