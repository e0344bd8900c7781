"""Code blocks of Markdown: each fenced block of Python is a program of its own, with its places in the file."""

from __future__ import annotations

import ast
import bisect
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property

from mpguard.core.text_edits import Edit, EditRefused, Span
from mpguard.lint.model.rule import Diagnostic

_FENCE = re.compile(
    r"^(?P<prefix>[ \t>]*)(?P<fence>`{3,}|~{3,})[ \t]*(?:\{?\.?(?P<python>python3?|py)(?![\w+-]))?(?P<info>[^\r\n]*)",
    re.M | re.I,
)
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of Python. lines: the spans of its lines in the file, without what the fence is indented by.

    prefix: what stands before each line. end: where the fence that closes it begins, after its prefix.
    """

    text: str
    prefix: str
    lines: tuple[Span, ...]
    end: int

    @cached_property
    def program(self) -> str:
        return "".join(self.text[first:last] for first, last in self.lines)

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for first, last in self.lines:
            starts.append(starts[-1] + last - first)
        return starts

    def offset(self, place: int) -> int:
        """Where an offset of the program stands in the file."""
        line = bisect.bisect_right(self._starts, place) - 1
        return self.lines[line][0] + place - self._starts[line] if line < len(self.lines) else self.end

    def relocated(self, found: Diagnostic) -> Diagnostic:
        """What was said of the program, as said of the file."""
        fix = found.fix
        if fix is not None:
            fix = dataclasses.replace(fix, edits=tuple(map(self._edit, fix.edits)))
        notes = tuple(
            note
            if note.span is None or note.path is not None
            else dataclasses.replace(note, span=self._span(note.span))
            for note in found.notes
        )
        return dataclasses.replace(found, span=self._span(found.span), notes=notes, fix=fix)

    def _span(self, span: Span) -> Span:
        start = self.offset(span[0])
        return start, start if span[1] <= span[0] else self.offset(span[1] - 1) + 1

    def _edit(self, edit: Edit) -> Edit:
        text = edit.text.replace("\n", "\n" + self.prefix) if self.prefix else edit.text
        return Edit(self.offset(edit.start), self.offset(edit.end), text)


def blocks(text: str) -> list[Block]:
    """The blocks of Python that parse, in order: what documentation shows is often a fragment."""
    return [block for block in _fenced(text) if _parses(block.program)]


def keeping(inside: list[Block], encode: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """`encode`, for texts in which all blocks of Python still parse; raises `Unwritable` for another one."""

    def encoded(text: str) -> bytes:
        if len(blocks(text)) < len(inside):
            raise EditRefused("the result does not parse")
        return encode(text)

    return encoded


def _fenced(text: str) -> Iterator[Block]:
    place = 0
    while (opening := _FENCE.search(text, place)) is not None:
        prefix, fence = opening["prefix"], opening["fence"]
        lines: list[Span] = []
        end = place = _LINE.match(text, opening.end()).end()  # type: ignore[union-attr]
        closed = False
        while place < len(text) and not closed:
            line = _LINE.match(text, place)
            assert line is not None
            first = place + _common(line.group(), prefix)
            content = line.group()[first - place :].strip()
            if content and set(content) == {fence[0]} and len(content) >= len(fence):
                closed, end = True, first
            else:
                lines.append((first, line.end()))
                end = line.end()
            place = line.end()
        # An info string with a backtick is no fence, but code in a paragraph; a block that nothing closes is none.
        if opening["python"] and closed and lines and not (fence[0] == "`" and "`" in opening["info"]):
            yield Block(text, prefix, tuple(lines), end)
        elif fence[0] == "`" and "`" in opening["info"]:
            place = opening.end()


def _common(line: str, prefix: str) -> int:
    """How much of a block's prefix a line has."""
    if line.startswith(prefix):
        return len(prefix)
    return next(i for i, (a, b) in enumerate(zip(line + "\0", prefix + "\0", strict=False)) if a != b)


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
