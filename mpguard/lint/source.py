"""A Python file: bytes, decoded text, top-level statements; each parsed by libcst when it is needed.

libcst takes 1.2 s for a megabyte, so only statements that matter are parsed, and positions are
made per statement and on demand. libcst's parser crashes the process on deep nesting: what would
is found beforehand, in `_limits`.
"""

from __future__ import annotations

import ast
import bisect
import codecs
import re
import sys
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import libcst as cst
from libcst._nodes.internal import CodegenState

if TYPE_CHECKING:
    from mpguard.lint.trees import Trees

#: CPython itself refuses deeper brackets; libcst's parser overflows its stack near 1,265.
MOST_BRACKETS = 200
#: Links of one `.b().b()` chain: libcst is quadratic in them (300 take 0.1 s, 10,000 over 100 s).
MOST_LINKS = 300
#: What all chains of a file cost together, in squared links: some 5 s in which libcst cannot be interrupted.
MOST_SQUARES = 10_000_000
#: Terms of one expression, and arms of one `if`; libcst overflows between 3,000 and 10,000.
MOST_TERMS = 1000
#: CPython's own limit of indentation levels.
MOST_LEVELS = 100
#: A byte of dense code becomes 800 of tree and facts. The largest file that people wrote has 1.1 MB (PyTorch's tests).
MOST_BYTES = 1_500_000
#: Deep enough for `MOST_TERMS`, a few Python frames each.
_FRAMES = 12_000

_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BLANK = re.compile(rb"^[ \t\f]*(?:#|$)")
_STRING = (
    r'"""(?:[^\\"]|\\.|"(?!""))*"""|\'\'\'(?:[^\\\']|\\.|\'(?!\'\'))*\'\'\''
    r'|"(?:[^\\"\n]|\\.)*"|\'(?:[^\\\'\n]|\\.)*\''
)
_SPLIT = re.compile(rf"(?:{_STRING}|#[^\n]*|\\\n)|([()\[\]{{}}])|(\n)(?=[^\s#])", re.DOTALL)
#: What `_limits` counts: brackets, separators that end a chain, operators, links.
_COUNTED = re.compile(
    rf"(?:{_STRING}|#[^\n]*|\\\n)|([(\[{{])|([)\]}}])|([,;]|\n)|(\.(?=\s*[^\W\d]))|"
    r"(\*\*|//|[-+*/%@|&^~<>=!]+|\b(?:and|or|not|if|lambda|await)\b)",
    re.DOTALL,
)
#: Where logical lines begin: a newline outside brackets and strings, before something that is no comment.
_LINES = re.compile(rf"(?:{_STRING}|#[^\n]*|\\\n)|([()\[\]{{}}])|\n(?=([ \t]*)[^\s#])", re.DOTALL)
_CHAIN = re.compile(r"(?:\.\w+(?:\([^()\n]*\))?){40}")
_OPERATORS = re.compile(r"[-+*/%@|&^~<>.\[(]|\b(?:and|or|not|if|lambda)\b")
_METHOD = re.compile(r"(?:async[ \t]+)?def[ \t]+(\w+)")
_OPERATOR_LINES = re.compile(r"^[ \t]*(?:\.|[-+*/|&]|and\b|or\b)|(?:[-+*/|&\\.]|and|or)[ \t]*$", re.MULTILINE)
_CONTINUES = re.compile(r"(?:else|elif|except|finally)\b|[)\]}]")
_DEFINES = re.compile(r"(?:@|(?:async[ \t]+)?def\b|class\b)")
_NAMED = re.compile(r"^(?:async[ \t]+)?(def|class)[ \t]+(\w+)", re.MULTILINE)


class Unparsable(Exception):
    """A file that cannot be read as Python; line and column (code points) start at 1.

    path: the file, where it may be another than the one asked about: statements are parsed late.
    """

    def __init__(self, message: str, line: int = 1, column: int = 1, path: str = "") -> None:
        super().__init__(message)
        self.message, self.line, self.column, self.path = message, line, column, path


class Method(NamedTuple):
    """A method of a class that is a chunk; its body is the lines below `def`, offsets are the chunk's."""

    name: str
    start: int
    body: int
    end: int
    indent: str


class Chunk:
    """One top-level statement, or the whole file; offsets are those of the normalised text.

    `text` as it stands; `code`, which is parsed, is as long, but the bodies of methods in `skipped` are `...`.
    """

    def __init__(self, source: Source, start: int, end: int) -> None:
        self.source, self.start, self.end = source, start, end
        self.skipped: tuple[Method, ...] = ()

    @property
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
    def methods(self) -> tuple[Method, ...]:
        """The methods of a class in their order, those on one line left out; empty for what is no class."""
        text, depth = self.text, 0
        if self.defines is None or not re.search(r"^class\b", text, re.MULTILINE):
            return ()
        lines: list[tuple[int, str]] = []
        for match in _LINES.finditer(text):
            if match.lastindex == 1:
                depth += 1 if match.group(1) in "([{" else -1
            elif match.lastindex == 2 and depth == 0:
                lines.append((match.end(), match.group(2)))
        members = next((indent for _, indent in lines if indent), "")
        found: list[Method] = []
        for index, (start, indent) in enumerate(lines):
            header = _METHOD.match(text, start + len(indent)) if indent and indent == members else None
            below = lines[index + 1 :]
            if header is None or not below or len(below[0][1]) <= len(indent):
                continue
            end = next((place for place, deeper in below if len(deeper) <= len(indent)), len(text))
            found.append(Method(header.group(1), start, below[0][0], end, below[0][1]))
        return tuple(method for method in found if method.end - method.body > len(method.indent) + len("...\n"))

    @cached_property
    def defines(self) -> str | None:
        """The name of the function or class that it is."""
        if not _DEFINES.match(self.text):
            return None
        found = _NAMED.search(self.text)
        return found.group(2) if found else None

    @cached_property
    def module(self) -> cst.Module:
        """Its tree; raises `Unparsable`."""
        before = self.source.trees.take(self.code) if self.source.trees is not None else None
        if before is not None:
            if "_spans" in before.__dict__:
                self.__dict__["_spans"] = before._spans
            return before.module
        try:
            return _parsed(self.code)
        except cst.ParserSyntaxError as error:
            line = self.source.position(self.source.offset(self.start))[0] + error.editor_line - 1
            message = "parse limit: Python accepts this, the linter's parser (libcst) does not"
            raise Unparsable(message, line, error.editor_column, self.source.path) from None

    @property
    def parsed(self) -> bool:
        """Whether its tree was asked for."""
        return "module" in self.__dict__

    @cached_property
    def _spans(self) -> dict[cst.CSTNode, tuple[int, int, int, int]]:
        state = _Positions(self.module.default_indent, self.module.default_newline)
        with Frames():
            self.module._codegen(state)
        return state.spans

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Where a node of this chunk stands in `Source.text`, without parentheses around it."""
        first, last, _, _ = self._spans[node]
        return self.source.offset(self.start + first), self.source.offset(self.start + last)

    def outer_span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The same with its parentheses; for a statement, with the comments above and the line's end."""
        _, _, first, last = self._spans[node]
        return self.source.offset(self.start + first), self.source.offset(self.start + last)


class _Positions(CodegenState):
    """Writes code, and remembers for each node the offsets between which it was written."""

    def __init__(self, default_indent: str, default_newline: str) -> None:
        super().__init__(default_indent, default_newline)
        self.offset = 0
        self.open: list[int] = []
        self.exact: dict[cst.CSTNode, tuple[int, int]] = {}
        self.spans: dict[cst.CSTNode, tuple[int, int, int, int]] = {}

    def add_token(self, value: str) -> None:
        self.offset += len(value)

    def add_indent_tokens(self) -> None:
        self.offset += sum(map(len, self.indent_tokens))

    def pop_trailing_newline(self) -> None:
        pass

    def before_codegen(self, node: cst.CSTNode) -> None:  # noqa: ARG002
        self.open.append(self.offset)

    def after_codegen(self, node: cst.CSTNode) -> None:
        first = self.open.pop()
        self.spans[node] = (*self.exact.pop(node, (first, self.offset)), first, self.offset)

    def record_syntactic_position(self, node: Any, *, start_node: Any = None, end_node: Any = None) -> Any:
        return _Recorded(self, node, start_node, end_node)


class _Recorded:
    """libcst's hook for the place of a node without its parentheses, comments and line end."""

    def __init__(self, state: _Positions, node: cst.CSTNode, start: Any, end: Any) -> None:
        self.state, self.node, self.start, self.end = state, node, start, end

    def __enter__(self) -> None:
        self.first = self.state.offset

    def __exit__(self, *error: object) -> None:
        spans = self.state.spans
        first = spans[self.start][0] if self.start in spans else self.first
        last = spans[self.end][1] if self.end in spans else self.state.offset
        self.state.exact[self.node] = (first, last)


class Source:
    """A file's bytes and what they say.

    data, path; `text`: decoded, line endings as they are, without the BOM; `encoding`, `bom`;
    `chunks`: its top-level statements; `trees`: where those of an earlier version are taken from.
    Spans and edits are offsets in `text`, in code points.
    """

    def __init__(self, data: bytes, path: str) -> None:
        self.data, self.path = data, path
        self.trees: Trees | None = None
        self.bom = data.startswith(codecs.BOM_UTF8)
        if len(data) > MOST_BYTES:
            what = f"the file has {len(data):,} bytes, the linter reads up to {MOST_BYTES:,}"
            raise Unparsable(f"parse limit: {what}; exclude it if it is generated")
        body = data[3:] if self.bom else data
        self.encoding = "utf-8" if self.bom else _cookie(body)
        self.text = _decoded(body, self.encoding)
        nul = self.text.find("\0")
        if nul >= 0:
            raise Unparsable("a NUL byte; Python source cannot hold one", *self.position(nul))
        self.normal, self._dropped = _normalised(self.text)

    @classmethod
    def parse(cls, data: bytes, path: str, check_syntax: bool = True) -> Source:
        """The source of a file that is Python; raises `Unparsable` with the place.

        check_syntax: False leaves syntax errors to `check_syntax`, or to when a statement is parsed.
        """
        source = cls(data, path)
        source._limits()
        if check_syntax:
            source.check_syntax()
        return source

    # -- places ---------------------------------------------------------------------------------

    def offset(self, normal: int) -> int:
        """An offset of the normalised text, in `text`."""
        if not self._dropped:
            return normal
        low = bisect.bisect_right(self._dropped, normal, key=lambda pair: pair[0])
        return normal + (self._dropped[low - 1][1] if low else 0)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer(r"\r\n?|\n", self.text))]

    def position(self, offset: int) -> tuple[int, int]:
        """(line, column) of an offset in `text`; both start at 1, columns are code points."""
        line = bisect.bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    # -- statements -----------------------------------------------------------------------------

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The top-level statements in order; each decorated definition is one, with its comments above."""
        text, depth, starts = self.normal, 0, [0]
        for match in _SPLIT.finditer(text):
            if match.lastindex == 1:
                depth += 1 if match.group(1) in "([{" else -1
            elif match.lastindex == 2 and depth == 0:
                place = match.end()
                if not _CONTINUES.match(text, place):
                    starts.append(place)
        if depth:
            return (Chunk(self, 0, len(text)),)
        joined: list[int] = []
        for start in starts:
            if not (joined and text[joined[-1]] == "@"):
                joined.append(start)
            elif _DEFINES.match(text, start) and text[start] != "@":
                joined.append(-joined.pop() - 1)  # marked: its definition was met
        bounds = [start if start >= 0 else -start - 1 for start in joined]
        return tuple(Chunk(self, *pair) for pair in zip(bounds, [*bounds[1:], len(text)], strict=True))

    @cached_property
    def whole(self) -> Chunk:
        """The file as one chunk."""
        return Chunk(self, 0, len(self.normal))

    # -- what cannot be read --------------------------------------------------------------------

    def check_syntax(self) -> None:
        """Raises `Unparsable` where Python refuses the file, and the parser does too."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(self.text)
        except SyntaxError as error:
            try:
                _parsed(self.normal)  # syntax newer than the Python that runs us
            except (cst.ParserSyntaxError, cst.CSTValidationError):
                line = error.lineno or 1
                raise Unparsable(f"syntax error: {error.msg}", line, max(error.offset or 1, 1)) from None
        except (RecursionError, MemoryError, ValueError) as error:
            raise Unparsable(f"parse limit: {error or type(error).__name__}") from None

    def _limits(self) -> None:
        """Finds what would crash or stall the parser; raises `Unparsable` at the first such place."""
        text = self.normal
        if not _suspect(text):
            return
        counts = [[0, 0]]
        arms = squares = 0
        for match in _COUNTED.finditer(text):
            kind, place = match.lastindex, match.start()
            if kind is None:
                continue
            if kind == 1:
                counts.append([0, 0])
                if len(counts) > MOST_BRACKETS + 1:
                    self._too_deep(f"more than {MOST_BRACKETS} nested brackets", place)
            elif kind == 2:
                if len(counts) > 1:
                    counts.pop()
                counts[-1][1] += 1
            elif kind == 3:
                if match.group() != "\n" or len(counts) == 1:
                    counts[-1] = [0, 0]
                if match.group() == "\n":
                    arms = arms + 1 if text.startswith("elif", _indented(text, place + 1)) else arms
            elif kind == 4:
                counts[-1][1] += 1
            else:
                counts[-1][0] += len(match.group()) if len(match.group()) > 3 else 1
                counts[-1][1] = 0
            squares += counts[-1][1]  # 1 + 2 + ... + n: half the square
            if squares > MOST_SQUARES // 2:
                self._too_deep("chains that are too many and too long", place)
            if counts[-1][0] > MOST_TERMS or arms > MOST_TERMS:
                self._too_deep(f"an expression of more than {MOST_TERMS} terms", place)
            if counts[-1][1] > 2 * MOST_LINKS:
                self._too_deep(f"a chain of more than {MOST_LINKS} links", place)
        levels = [0]
        for match in re.finditer(r"^([ \t]*)[^\s#]", text, re.MULTILINE):
            width = len(match.group(1))
            while width < levels[-1]:
                levels.pop()
            if width > levels[-1]:
                levels.append(width)
            if len(levels) > MOST_LEVELS:
                self._too_deep(f"more than {MOST_LEVELS} levels of indentation", match.end() - 1)

    def _too_deep(self, what: str, place: int) -> None:
        raise Unparsable(f"parse limit: {what}", *self.position(self.offset(place)))


def _indented(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t"):
        place += 1
    return place


def _suspect(text: str) -> bool:
    """Whether the text could hold anything too deep: cheap, and true for no ordinary file of moderate size."""
    if re.search(r"[(\[{](?:[^()\[\]{}]*[(\[{]){60}", text) or re.search(r"^[ \t]{100}", text, re.MULTILINE):
        return True
    if text.count("elif") > MOST_TERMS:
        return True
    found = run = 0
    for line in text.split("\n"):
        if len(line) >= 600 and len(_OPERATORS.findall(line)) > MOST_LINKS // 2:
            return True
        if line.count(".") >= 40 and _CHAIN.search(line):
            return True
        # chains over many lines: operators at line starts or ends
        code = line.strip(" \t")
        if code and (code[0] in ".-+*/|&ao" or code[-1] in ".-+*/|&\\dr") and _OPERATOR_LINES.search(line):
            found, run = found + 1, run + 1
            if found > 2 * MOST_TERMS or run > MOST_LINKS // 2:
                return True
        else:
            run = 0
    return False


_CHECK_NODE = cst.CSTNode.__post_init__


def _parsed(text: str) -> cst.Module:
    """libcst's tree of some code. The nodes do not check themselves: that takes long, and refuses `return.5`."""
    cst.CSTNode.__post_init__ = _is_sound  # type: ignore[method-assign, assignment]
    try:
        with Frames():
            return cst.parse_module(text)
    finally:
        cst.CSTNode.__post_init__ = _CHECK_NODE  # type: ignore[method-assign]


def _is_sound(_node: cst.CSTNode) -> None:
    """Stands in for a node's own check."""


class Frames:
    """Lets Python recurse deeper for a while: long expressions are deep trees."""

    def __enter__(self) -> None:
        self.before = sys.getrecursionlimit()
        sys.setrecursionlimit(max(self.before, _FRAMES))

    def __exit__(self, *error: object) -> None:
        sys.setrecursionlimit(self.before)


def _cookie(body: bytes) -> str:
    """The encoding that PEP 263 gives a file without a BOM."""
    for line in re.split(rb"\r\n?|\n", body[:1000], maxsplit=2)[:2]:
        found = _COOKIE.match(line)
        if found:
            return found.group(1).decode("ascii")
        if not _BLANK.match(line):
            break
    return "utf-8"


def _decoded(body: bytes, encoding: str) -> str:
    try:
        codec = codecs.lookup(encoding)
        if not getattr(codec, "_is_text_encoding", True):
            raise LookupError(encoding)
        return codec.decode(body, "strict")[0]
    except LookupError:
        raise Unparsable(f"unknown encoding `{encoding}` in the coding line", 1) from None
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        begin = body.rfind(b"\n", 0, error.start) + 1
        column = len(body[begin : error.start].decode(encoding, "replace")) + 1
        raise Unparsable(
            f"not {encoding}: byte 0x{body[error.start]:02x}; save the file as UTF-8, or name its encoding (PEP 263)",
            line,
            column,
        ) from None


def _normalised(text: str) -> tuple[str, list[tuple[int, int]]]:
    r"""The text with `\n` alone, without form feeds; and (offset in it, characters dropped up to there)."""
    if "\r" not in text and "\f" not in text:
        return text, []
    parts: list[str] = []
    dropped: list[tuple[int, int]] = []
    last = length = gone = 0
    for match in re.finditer(r"\r\n?|\f", text):
        part = text[last : match.start()]
        parts.append(part)
        length += len(part)
        last = match.end()
        if match.group() == "\r":
            parts.append("\n")
            length += 1
            continue
        if match.group() == "\r\n":
            parts.append("\n")
            gone += 1
            dropped.append((length + 1, gone))
            length += 1
        else:
            gone += 1
            dropped.append((length, gone))
    parts.append(text[last:])
    return "".join(parts), dropped
