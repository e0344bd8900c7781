"""Fenced blocks of Python in Markdown: each is checked as a separate program; positions refer to the file."""

from __future__ import annotations

import ast
import bisect
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.text_edits import Edit, EditRefused, Span
from mpguard.lint.model.rule import Diagnostic

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

#: A line that may open a block of Python: without one, the Markdown parser is neither imported nor run.
_PYTHON_FENCE = lazy_pattern(r"(?:`{3}|~{3})[ \t]*\{?\.?py", re.I)
#: The info string of a block of Python: `python`, `py title="a.py"`, `{.python .numberLines}`.
_PYTHON = lazy_pattern(r"[ \t]*\{?\.?(?:python3?|py)(?![\w+-])", re.I)
_LINE_END = lazy_pattern(r"\r\n?|\n")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of Python. lines: the spans of its lines in the file, without the indentation of the fence.

    prefix: the text before each line, of quotes and lists. end: the offset of the fence that closes the block.
    """

    text: str
    prefix: str
    lines: tuple[Span, ...]
    end: int

    @cached_property
    def program(self) -> str:
        """The code of the block."""
        return "".join(self.text[first:last] for first, last in self.lines)

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for first, last in self.lines:
            starts.append(starts[-1] + last - first)
        return starts

    def offset(self, place: int) -> int:
        """Return the offset in the file of an offset in the program."""
        line = bisect.bisect_right(self._starts, place) - 1
        return self.lines[line][0] + place - self._starts[line] if line < len(self.lines) else self.end

    def relocated(self, diagnostic: Diagnostic) -> Diagnostic:
        """Return a diagnostic of the program with its places in the file."""
        fix = diagnostic.fix
        if fix is not None:
            fix = dataclasses.replace(fix, edits=tuple(map(self._edit, fix.edits)))
        notes = tuple(
            note
            if note.span is None or note.path is not None
            else dataclasses.replace(note, span=self._span(note.span))
            for note in diagnostic.notes
        )
        return dataclasses.replace(diagnostic, span=self._span(diagnostic.span), notes=notes, fix=fix)

    def _span(self, span: Span) -> Span:
        start = self.offset(span[0])
        return start, start if span[1] <= span[0] else self.offset(span[1] - 1) + 1

    def _edit(self, edit: Edit) -> Edit:
        text = edit.text.replace("\n", "\n" + self.prefix) if self.prefix else edit.text
        return Edit(self.offset(edit.start), self.offset(edit.end), text)


def blocks(text: str) -> list[Block]:
    """Return the blocks of Python that parse, in order. What documentation shows is often a fragment."""
    if _PYTHON_FENCE.search(text) is None:
        return []
    return [block for block in _fenced(text) if _parses(block.program)]


def keeping(before: list[Block], encode: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """Return `encode` for texts in which all blocks of Python still parse; for others it raises `EditRefused`."""

    def encoded(text: str) -> bytes:
        if len(blocks(text)) < len(before):
            raise EditRefused("the result does not parse")
        return encode(text)

    return encoded


def _fenced(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of Python that are closed."""
    lines = _line_spans(text)
    for token in _parser().parse(text):
        if token.type != "fence" or token.map is None or not _PYTHON.match(token.info):
            continue
        opening, after = token.map
        *content, rest = token.content.split("\n")
        inside = lines[opening + 1 : after - 1]
        # CommonMark ends an unclosed block with the file. It is skipped: its end is probably a mistake.
        if rest or not content or len(content) != len(inside):
            continue
        spans = tuple(_content_span(text, span, line) for span, line in zip(inside, content, strict=True))
        if None not in spans:
            before_fence = text[lines[opening][0] :].partition(token.markup)[0]
            prefix = re.sub(r"[^\s>]", " ", before_fence)  # a list's marker is on its first line only
            first, last = lines[after - 1]
            end = first + len(text[first:last].rstrip().rstrip(token.markup[0]))
            yield Block(text, prefix, spans, end)  # type: ignore[arg-type]


@functools.cache
def _parser() -> MarkdownIt:
    """Return a Markdown parser that finds blocks only.

    `code` is off because documentation tools (MkDocs' tabs and admonitions) allow fences at any indentation, and
    `html_block` because they are in `<details>` and other tags too.
    """
    from markdown_it import MarkdownIt  # 0.1 s, and only files with blocks of Python need it

    return MarkdownIt("commonmark").disable(["code", "html_block", "inline", "text_join"])


def _line_spans(text: str) -> list[Span]:
    """Return the spans of all lines, with their ends; LF, CRLF and CR end one, as they do for the parser."""
    ends = [match.end() for match in _LINE_END.finditer(text)]
    starts = [0, *ends]
    return list(zip(starts, [*ends, len(text)], strict=True))


def _content_span(text: str, span: Span, content: str) -> Span | None:
    """Return the span of a line of a block without its prefix; None where the parser has expanded a tab in it."""
    line = text[slice(*span)].rstrip("\r\n")
    return (span[0] + len(line) - len(content), span[1]) if line.endswith(content) else None


def _parses(code: str) -> bool:
    """True if Python can parse some code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
