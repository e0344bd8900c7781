"""What a run reports: plain data with lines and columns, as in JSON, and cheap to send between processes."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from mpguard.core.text_edits import line_starts

if TYPE_CHECKING:
    from mpguard.lint.model.rule import Applicability, BaseRule, Diagnostic, Note, Severity

Position = tuple[int, int]


class Lines:
    """Lines and columns of a text: both start at 1, columns count code points; LF, CRLF and CR end a line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = list(line_starts(text))
        self._line = functools.lru_cache(64)(self._cut)  # many findings in one long line share it

    def position(self, offset: int) -> Position:
        """Return the line and column of an offset."""
        line = bisect.bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a line and column."""
        return self.starts[line - 1] + column - 1

    def line(self, number: int) -> str:
        """Return the text of a line without its end; empty for a line that does not exist."""
        return self._line(number)

    def _cut(self, number: int) -> str:
        if not 1 <= number <= len(self.starts):
            return ""
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[self.starts[number - 1] : end].rstrip("\r\n")


@dataclasses.dataclass(frozen=True)
class PlacedEdit:
    """An edit with lines and columns instead of offsets. cell: the number of the notebook's cell."""

    start: Position
    end: Position
    text: str
    cell: int | None = None


@dataclasses.dataclass(frozen=True)
class PlacedFix:
    """A fix with lines and columns."""

    title: str
    applicability: Applicability
    edits: tuple[PlacedEdit, ...]


@dataclasses.dataclass(frozen=True)
class PlacedNote:
    """A remark; with `start` a second place, in `path` (None: the finding's file). source: the text of its line."""

    message: str
    path: str | None = None
    start: Position | None = None
    end: Position | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem, with its place.

    source: the lines around it with their numbers, for readers of the report.
    cell: the number of the notebook's cell, from 1; lines and columns are then those of the cell's source.
    """

    code: str
    name: str
    severity: Severity
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    message: str
    help: str = ""
    fix: PlacedFix | None = None
    notes: tuple[PlacedNote, ...] = ()
    source: tuple[tuple[int, str], ...] = ()
    cell: int | None = None

    @property
    def file(self) -> str:
        """The file, and the cell in it, as reports name it."""
        return self.path if self.cell is None else f"{self.path}:cell {self.cell}"

    @property
    def order(self) -> tuple[Any, ...]:
        """The key that findings are sorted by."""
        return self.path, self.cell or 0, self.line, self.column, self.code, self.message


def placed(diagnostic: Diagnostic, rule: type[BaseRule], path: str, lines: Lines, others: dict[str, Lines]) -> Finding:
    """Return a diagnostic with lines and columns. others: the texts of the other files that notes point into."""
    start, end = lines.position(diagnostic.span[0]), lines.position(max(diagnostic.span))
    fix = None
    if diagnostic.fix is not None:
        edits = tuple(PlacedEdit(lines.position(e.start), lines.position(e.end), e.text) for e in diagnostic.fix.edits)
        fix = PlacedFix(diagnostic.fix.title, diagnostic.fix.applicability, edits)
    return Finding(
        rule.code,
        rule.name,
        diagnostic.severity or rule.severity,
        path,
        *start,
        *end,
        diagnostic.message,
        diagnostic.help or rule.help,
        fix,
        tuple(_note(note, lines, others) for note in diagnostic.notes),
        tuple((number, lines.line(number)) for number in range(max(start[0] - 2, 1), start[0] + 1)),
    )


def _note(note: Note, lines: Lines, others: dict[str, Lines]) -> PlacedNote:
    text = lines if note.path is None else others.get(note.path)
    if note.span is None or text is None:
        return PlacedNote(note.message, note.path)
    start, end = text.position(note.span[0]), text.position(max(note.span))
    return PlacedNote(note.message, note.path, start, end, text.line(start[0]))
