"""Jupyter notebooks: all code cells of one as one program, and edits of the program as edits of its JSON.

Cells are numbered from 1, with text cells, as ruff does; lines and columns are those of a cell's own
source. Magics are replaced by text of the same length, so that offsets do not change. Only the
`source` of cells that change is edited: outputs, metadata, key order and indentation stay the same,
byte for byte.
"""

from __future__ import annotations

import bisect
import codecs
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.text_edits import Edit, EditRefused, apply_edits
from mpguard.document.json_reader import JsonScanner, JsonValue
from mpguard.document.nodes import Unreadable
from mpguard.lint.model.finding import Finding, Lines, PlacedEdit, PlacedNote, Position
from mpguard.lint.source.text import STRING

#: Cell magics whose cell is Python of this notebook; cells with any other are in another language, or another
#: process.
_PYTHON_MAGICS = frozenset({"capture", "prun", "time", "timeit"})
_CELL_MAGIC = lazy_pattern(r"(?:[ \t\r]*(?:#[^\n]*)?\n)*[ \t]*%%(\w+)")
_TOKEN = lazy_pattern(rf"({STRING}|#[^\n]*|\\\r?\n)|([(\[{{])|([)\]}}])|\n", re.DOTALL)
_LINE = r"(?:[^\\\n]|\\(?!\r?\n)|\\\r?\n)*"
#: Commands that IPython takes without a `%`, where no Python can follow: `pip install ...`, `cd folder`.
_COMMAND = (
    r"(?:pip|conda)[ \t]+install\b"
    r"|(?:cd|ls|mkdir|rmdir|cat|cp|mv|rm)[ \t]+(?:-[\w-]+[ \t]+)*(?!(?:and|else|for|if|in|is|not|or)\b)[\w~$\"'./]"
)
#: The statements that IPython interprets itself: `%pip`, `!ls`, `?x`, `x?`, and commands without a `%`.
_MAGIC = lazy_pattern(rf"[ \t]*(?:([%!?]{_LINE})|([\w.]+\?\??[ \t]*)(?=\r?$)|((?:{_COMMAND}){_LINE}))", re.M)
_ASSIGNED = lazy_pattern(rf"[ \t]*[\w.,* \[\]]+=[ \t]*([%!]{_LINE})")
#: A cell that begins with an indented line of code.
_INDENTED = lazy_pattern(r"(?:[ \t\r]*(?:#[^\n]*)?\n)*[ \t]+[^\s#]")


class BrokenNotebook(Exception):
    """The file is not a notebook. offset: the place of the problem in its text."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.message, self.offset = message, offset


@dataclasses.dataclass(frozen=True)
class Cell:
    """A code cell. number: its number among all cells, from 1. text: its source. span: `source` in the notebook's text.

    start: its offset in the program. blanked: the spans of its text that are blanked in the program.
    literals: the spans of the JSON strings of its source, if that is a list; None if it is one string.
    """

    number: int
    text: str
    span: tuple[int, int]
    literals: tuple[tuple[int, int], ...] | None
    start: int = 0
    blanked: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The offset of its end in the program, with the line end that is added there."""
        return self.start + len(self.text) + (not self.text.endswith("\n"))

    @functools.cached_property
    def lines(self) -> Lines:
        """The lines of its source."""
        return Lines(self.text)


class Notebook:
    """A notebook's text, its Python cells in order, and the program they form. Raises `BrokenNotebook`."""

    def __init__(self, data: bytes) -> None:
        self.bom = data.startswith(codecs.BOM_UTF8)
        try:
            self.text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self.text = data.decode("utf-8", "replace").removeprefix("\ufeff")
            place = len(data[: error.start].decode("utf-8-sig"))
            raise BrokenNotebook(
                f"not UTF-8: byte 0x{data[error.start]:02x}; save the notebook as UTF-8", place
            ) from None
        try:
            self.python, found = _cells(self.text)
        except json.JSONDecodeError as error:
            raise BrokenNotebook(f"not JSON, as a notebook must be: {error.msg}", error.pos) from None
        except Unreadable as error:
            reason = error.problem.message.removeprefix("invalid JSON: ")
            raise BrokenNotebook(f"not JSON, as a notebook must be: {reason}", error.problem.span[0]) from None
        except RecursionError:
            raise BrokenNotebook("not JSON, as a notebook must be: nested too deeply") from None
        cells: list[Cell] = []
        program: list[str] = []
        for cell in found if self.python else ():
            code, blanked = _without_magics(cell.text)
            if not cell.text.strip() or code is None:
                continue
            if _INDENTED.match(code):
                program.append("if True:\n")  # IPython removes the indentation; the line belongs to no cell
            cells.append(dataclasses.replace(cell, start=sum(map(len, program)), blanked=tuple(blanked)))
            program.append(code if code.endswith("\n") else code + "\n")
        self.cells = tuple(cells)
        self.program = "".join(program)
        self._starts = [cell.start for cell in cells]
        self._lines = Lines(self.program)

    def cell_at(self, offset: int) -> Cell:
        """Return the cell that contains an offset of the program."""
        return self.cells[max(bisect.bisect_right(self._starts, offset) - 1, 0)]

    # -- findings -------------------------------------------------------------------------------

    def place(self, position: Position) -> tuple[Cell, Position]:
        """Return the cell of a position in the program, and the line and column in it."""
        offset = self._lines.offset(*position)
        cell = self.cell_at(offset)
        return cell, cell.lines.position(min(offset - cell.start, len(cell.text)))

    def relocated(self, finding: Finding) -> Finding:
        """Return a finding of the program with its place in a cell."""
        if not self.cells:
            return finding
        cell, (line, column) = self.place((finding.line, finding.column))
        last, (end_line, end_column) = self.place((finding.end_line, finding.end_column))
        if last is not cell:
            end_line, end_column = line, column
        fix = finding.fix
        if fix is not None:
            fix = dataclasses.replace(fix, edits=tuple(map(self._edit, fix.edits)))
        return dataclasses.replace(
            finding, cell=cell.number, line=line, column=column, end_line=end_line, end_column=end_column, fix=fix,
            notes=tuple(self._note(note, cell, finding.path) for note in finding.notes),
            source=tuple((number, cell.lines.line(number)) for number in range(max(line - 2, 1), line + 1)),
        )  # fmt: skip

    def _edit(self, edit: PlacedEdit) -> PlacedEdit:
        cell, start = self.place(edit.start)
        last, end = self.place(edit.end)
        if last is not cell:  # it ends at a line end, which is the end of the cell
            end = cell.lines.position(len(cell.text))
        return dataclasses.replace(edit, start=start, end=end, cell=cell.number)

    def _note(self, note: PlacedNote, at: Cell, path: str) -> PlacedNote:
        if note.start is None or note.end is None or note.path is not None:
            return note
        cell, start = self.place(note.start)
        other = None if cell is at else f"{path}:cell {cell.number}"
        return dataclasses.replace(note, path=other, start=start, end=max(start, self.place(note.end)[1]))

    # -- back into the notebook -----------------------------------------------------------------

    def edited(self, edits: Iterable[Edit]) -> bytes:
        """Return the notebook with edits of its program applied to its cells. Raises `EditRefused`."""
        by_cell: dict[int, list[Edit]] = {}
        for edit in edits:
            cell = self.cell_at(edit.start)
            start, end = edit.start - cell.start, edit.end - cell.start
            if edit.end > cell.end:
                raise EditRefused("it spans two cells")
            if any((start < last and first < end) or first < start == end < last for first, last in cell.blanked):
                raise EditRefused("it would replace a magic")
            by_cell.setdefault(cell.number, []).append(Edit(start, end, edit.text))
        changes = [self._cell_edit(cell, by_cell[cell.number]) for cell in self.cells if cell.number in by_cell]
        return (codecs.BOM_UTF8 if self.bom else b"") + apply_edits(self.text, changes).encode("utf-8", "surrogatepass")

    def _cell_edit(self, cell: Cell, edits: list[Edit]) -> Edit:
        """Return the edit of the notebook's text for edits of one cell."""
        ended = cell.text.endswith("\n")
        new = apply_edits(cell.text if ended else cell.text + "\n", edits)
        new = new if ended or not new.endswith("\n") else new[:-1]
        before = self.text[slice(*cell.span)]
        if cell.literals is None:
            return Edit(*cell.span, _literal(new, before))
        kept: dict[str, str] = {}
        for first, last in cell.literals:
            kept.setdefault(json.loads(self.text[first:last]), self.text[first:last])
        items = [kept.get(line, _literal(line, before)) for line in re.findall(r"[^\n]*\n|[^\n]+", new)]
        opening, closing = self.text[cell.span[0] : cell.literals[0][0]], self.text[cell.literals[-1][1] : cell.span[1]]
        if len(cell.literals) > 1:
            between = self.text[cell.literals[0][1] : cell.literals[1][0]]
        else:
            between = "," + (opening[1:] or " ")
        return Edit(*cell.span, f"{opening}{between.join(items)}{closing}" if items else "[]")


def _literal(text: str, like: str) -> str:
    """Return a JSON string, with `\\u` escapes if the text `like`, which it replaces, has some."""
    return json.dumps(text, ensure_ascii=like.isascii() and "\\u" in like)


# -- reading ----------------------------------------------------------------------------------------


def _cells(text: str) -> tuple[bool, list[Cell]]:
    """Return True if the notebook is in Python, and its code cells with their positions; an empty file has none."""
    if not text.strip():
        return True, []
    scanner = JsonScanner(text)
    notebook = _members(scanner, scanner.skip_space(0))
    if "cells" not in notebook:
        if "worksheets" in notebook:
            raise BrokenNotebook(
                "a notebook of format 3 or older; `jupyter nbconvert --to notebook` makes one of format 4"
            )
        raise BrokenNotebook("not a notebook: `cells`, a list, is needed")
    metadata = notebook["metadata"].value if "metadata" in notebook else {}
    found = []
    for number, item in enumerate(_items(scanner, notebook["cells"].start), 1):
        cell = _members(scanner, item.start)
        if "cell_type" not in cell or cell["cell_type"].value != "code":
            continue
        if "source" not in cell:
            raise BrokenNotebook(f"cell {number} has no `source`", item.start)
        source, span = cell["source"].value, (cell["source"].start, cell["source"].end)
        if isinstance(source, str):
            found.append(Cell(number, source, span, None))
        elif isinstance(source, list) and all(isinstance(line, str) for line in source):
            literals = tuple((line.start, line.end) for line in _items(scanner, span[0]))
            found.append(Cell(number, "".join(source), span, literals))
        else:
            raise BrokenNotebook(f"the `source` of cell {number} is neither a string nor a list of strings", span[0])
    return _language(metadata) in ("", "python", "ipython"), found


def _members(scanner: JsonScanner, start: int) -> dict[str, JsonValue]:
    """Return the members of the object at an offset: key -> value."""
    if scanner.text[start : start + 1] != "{":
        raise BrokenNotebook("not a notebook: an object in `{}` is needed here", start)
    return {key.value: value for key, value in scanner.members(start, scanner.decoded)}


def _items(scanner: JsonScanner, start: int) -> Iterator[JsonValue]:
    """Return the items of the array at an offset."""
    if scanner.text[start : start + 1] != "[":
        raise BrokenNotebook("not a notebook: a list is needed here", start)
    return scanner.items(start, scanner.decoded)


def _language(metadata: object) -> str:
    """Return the kernel's language, in lower case without a version; empty if the notebook does not specify it."""
    for section, key in (("language_info", "name"), ("kernelspec", "language"), ("kernelspec", "name")):
        inside = metadata.get(section) if isinstance(metadata, dict) else None
        language = inside.get(key) if isinstance(inside, dict) else None
        if isinstance(language, str) and language:
            if key == "name" and section == "kernelspec":
                return "" if "py" in language.lower() or "conda" in language.lower() else language.lower()
            return language.lower().rstrip("0123456789.")
    return ""


# -- magics -----------------------------------------------------------------------------------------


def _without_magics(text: str) -> tuple[str | None, list[tuple[int, int]]]:
    """Return a cell's Python with its magics blanked, and their spans; None for a cell that is not Python."""
    spans: list[tuple[int, int]] = []
    place = 0
    cell_magic = _CELL_MAGIC.match(text)
    if cell_magic is not None:
        if cell_magic.group(1) not in _PYTHON_MAGICS:
            return None, []
        first = text.index("%%")
        place = text.find("\n", first)
        place = len(text) if place < 0 else place
        spans.append((first, place))
        place += 1
    if not re.search(rf"[%!?]|^[ \t]*(?:{_COMMAND})", text[place:], re.M):
        return _blank(text, spans), spans
    depth = 0
    while place <= len(text):
        found = (_MAGIC.match(text, place) or _ASSIGNED.match(text, place)) if depth <= 0 else None
        if found is not None:
            spans.append(found.span(found.lastindex or 0))
            place = found.end()
        for token in _TOKEN.finditer(text, place):
            depth += (token.lastindex == 2) - (token.lastindex == 3)
            place = token.end()
            if token.lastindex is None and depth <= 0:
                break
        else:
            break
    return _blank(text, spans), spans


def _blank(text: str, spans: list[tuple[int, int]]) -> str:
    """Replace each magic by `_` and spaces: a name of unknown value."""
    for first, last in spans:
        text = text[:first] + "_" + re.sub(r"[^\r\n]", " ", text[first + 1 : last]) + text[last:]
    return text
