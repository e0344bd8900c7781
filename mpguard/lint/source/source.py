"""A Python file: its top-level statements, each parsed by libcst when it is needed.

libcst takes 1.2 s for a megabyte, so only the statements that rules need are parsed, and positions
are computed per statement and on demand.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.source import incremental, parser_limits
from mpguard.lint.source.incremental import Tree
from mpguard.lint.source.libcst_internals import parse_module
from mpguard.lint.source.suites import logical_lines
from mpguard.lint.source.text import STRING, Text, Unparsable

#: Brackets with nothing in them that counts are skipped like a string. Many of these, and what is between them, are one
#: match; not all of them, because the engine keeps a state for each.
_SKIPPED = rf"{STRING}|#[^\n]*|\\\n|[(\[{{][^()\[\]{{}}\"'#\\]*[)\]}}]"
_SPLIT = lazy_pattern(
    rf"(?:{_SKIPPED})(?:[^()\[\]{{}}\"'#\\\n]+|\n(?=[\s#])|{_SKIPPED}){{,99}}|([()\[\]{{}}])|(\n)(?=[^\s#])", re.DOTALL
)
_METHOD = lazy_pattern(r"(?:async[ \t]+)?def[ \t]+(\w+)")
_CONTINUES = lazy_pattern(r"(?:else|elif|except|finally)\b|[)\]}]")
_DEFINES = lazy_pattern(r"(?:@|(?:async[ \t]+)?def\b|class\b)")
_NAMED = lazy_pattern(r"^(?:async[ \t]+)?(def|class)[ \t]+(\w+)", re.MULTILINE)


class MethodText(NamedTuple):
    """A method of a class that is a chunk. Its body is the lines below `def`; offsets are in the chunk."""

    name: str
    start: int
    body: int
    end: int
    indent: str


class Chunk:
    """One top-level statement, or the whole file; offsets are in the normalized text.

    `code`, which is parsed, has the length of `text`, but `...` for the bodies of the methods in `skipped`.
    """

    def __init__(self, source: Source, start: int, end: int) -> None:
        self.source, self.start, self.end = source, start, end
        self.skipped: tuple[MethodText, ...] = ()
        #: Nodes that are not in the code -> the node at whose place they are.
        self.places: dict[cst.CSTNode, cst.CSTNode] = {}

    @cached_property
    def text(self) -> str:
        return self.source.normal[self.start : self.end]

    @property
    def code(self) -> str:
        text, parts, last = self.text, [], 0
        for method in self.skipped:
            body = text[method.body : method.end]
            filled = f"{method.indent}..."
            ending = "\n" if body.endswith("\n") else ""
            parts += [text[last : method.body], filled.ljust(len(body) - len(ending)), ending]
            last = method.end
        return "".join((*parts, text[last:]))

    @cached_property
    def methods(self) -> tuple[MethodText, ...]:
        """The methods of a class in their order, without those on one line; empty for any other statement."""
        text = self.text
        if self.defines is None or not re.search(r"^class\b", text, re.MULTILINE):
            return ()
        return _methods(text)

    @cached_property
    def defines(self) -> str | None:
        """The name of the function or class that it defines; None if it defines none."""
        if not _DEFINES.match(self.text):
            return None
        found = _NAMED.search(self.text)
        return found.group(2) if found else None

    @cached_property
    def _tree(self) -> Tree:
        try:
            return self.source.tree_of(self.code)
        except cst.ParserSyntaxError as error:
            line = self.source.position(self.source.offset(self.start))[0] + error.editor_line - 1
            message = "parse limit: Python accepts this, the linter's parser (libcst) does not"
            raise Unparsable(message, line, error.editor_column, self.source.path) from None

    @property
    def module(self) -> cst.Module:
        """Its tree. Raises `Unparsable`."""
        return self._tree.module

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the span of a node of this chunk in `Source.text`, without the parentheses around it."""
        first, last, _, _ = self._tree.spans(self.places.get(node, node))
        return self.source.offset(self.start + first), self.source.offset(self.start + last)

    def outer_span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the span of a node with its parentheses; of a statement, with the comments above and the line end."""
        _, _, first, last = self._tree.spans(self.places.get(node, node))
        return self.source.offset(self.start + first), self.source.offset(self.start + last)


class Source(Text):
    """A file's text and its statements. tree_of: parses a statement. items_of: see `mappings.Mappings`."""

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(data, path)
        self.tree_of: Callable[[str], Tree] = incremental.parse
        self.items_of: Callable[[Any], tuple[dict[str, cst.BaseExpression], bool]] = lambda _: ({}, False)

    @classmethod
    def parse(cls, data: bytes, path: str, check_syntax: bool = True) -> Source:
        """Return the source of a Python file. Raises `Unparsable`, with the place.

        check_syntax: False leaves syntax errors to a later `check_syntax`, or to the parse of a statement.
        """
        source = cls(data, path)
        parser_limits.check(source)
        if check_syntax:
            source.check_syntax()
        return source

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The top-level statements in order; each decorated definition is one, with its comments above."""
        bounds = _bounds(self.normal)
        return tuple(Chunk(self, *pair) for pair in itertools.pairwise(bounds))

    def in_mapping(self, start: int, end: int) -> bool:
        """True if a span overlaps a `**mapping` at whose place are items that the code of the call does not contain."""
        places = (chunk.span(node) for chunk in self.chunks for node in dict.fromkeys(chunk.places.values()))
        return any(start < last and end > first for first, last in places)

    @cached_property
    def whole(self) -> Chunk:
        """The file as one chunk."""
        return Chunk(self, 0, len(self.normal))

    def check_syntax(self) -> None:
        """Raise `Unparsable` if both Python and libcst reject the file."""
        if self.normal is self.text and all(_accepted(chunk.text) for chunk in self.chunks):
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(self.text)
        except SyntaxError as error:
            try:
                parse_module(self.normal)  # the syntax may be newer than the Python that runs mpguard
            except (cst.ParserSyntaxError, cst.CSTValidationError):
                line = error.lineno or 1
                raise Unparsable(f"syntax error: {error.msg}", line, max(error.offset or 1, 1)) from None
        except (RecursionError, MemoryError, ValueError) as error:
            raise Unparsable(f"parse limit: {error or type(error).__name__}") from None


# In an editor, a file is checked again after one of its statements was changed.
@lru_cache(maxsize=2048)
def _accepted(statement: str) -> bool:
    """True if Python accepts a statement by itself. Where it does not, a statement may be only a part of one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(statement)
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return False
    return True


# A file is read again for each file that imports it: what follows from its text alone is kept.
@lru_cache(maxsize=128)
def _bounds(text: str) -> list[int]:
    """Return where the top-level statements begin, and the end of the text."""
    depth, starts = 0, [0]
    for match in _SPLIT.finditer(text):
        if match.lastindex == 1:
            depth += 1 if match.group(1) in "([{" else -1
        elif match.lastindex == 2 and depth == 0:
            place = match.end()
            if not _CONTINUES.match(text, place):
                starts.append(place)
    if depth:
        return [0, len(text)]
    joined: list[int] = []
    for start in starts:
        if not (joined and text[joined[-1]] == "@"):
            joined.append(start)
        elif _DEFINES.match(text, start) and text[start] != "@":
            joined.append(-joined.pop() - 1)  # negative: its definition was found
    return [*(start if start >= 0 else -start - 1 for start in joined), len(text)]


@lru_cache(maxsize=128)
def _methods(text: str) -> tuple[MethodText, ...]:
    """Return the methods of a class in their order, without those on one line."""
    lines = logical_lines(text)
    members = next((line.indent for line in lines if line.indent), "")
    found: list[MethodText] = []
    for index, (start, _, indent) in enumerate(lines):
        header = _METHOD.match(text, start + len(indent)) if indent and indent == members else None
        below = lines[index + 1 :]
        if header is None or not below or len(below[0].indent) <= len(indent):
            continue
        end = next((line.start for line in below if len(line.indent) <= len(indent)), len(text))
        found.append(MethodText(header.group(1), start, below[0].start, end, below[0].indent))
    return tuple(method for method in found if method.end - method.body > len(method.indent) + len("...\n"))
