"""Keeps trees for the next version of a file: typing changes one suite, and parsing takes half of a check's time.

Facts are kept by node, so a tree belongs to one version at a time: the next one takes it over, unchanged or with other
suites in it.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import libcst as cst

from mpguard.lint.source import libcst_internals
from mpguard.lint.source.libcst_internals import Spans
from mpguard.lint.source.suites import Cut, cut_suites

#: The number of files whose trees are kept: a tree takes some hundred times the memory of its text.
MOST = 8


class Piece:
    """Code that is parsed separately: a statement, or a suite of one. Suites that were cut out are inserted later.

    user: the tree that it is part of, or was.
    """

    def __init__(self, cut: Cut) -> None:
        self.module = libcst_internals.parse_module(cut.before + cut.code)
        self.user: Tree | None = None
        self.depth = cut.depth
        self._holes = _holes(self.module, cut) if cut.holes else []
        self._own = [(block.body, block.footer) for block in self._holes]

    @property
    def suite(self) -> cst.IndentedBlock:
        """The suite, of a piece that is one: that of an `if`, or of an `if` in another."""
        block = next(_blocks(self.module.body[-1:]))
        return next(_blocks(block.body)) if self.depth == 2 else block

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Insert suites where they were cut out."""
        for block, piece in zip(self._holes, pieces, strict=True):
            suite = piece.suite
            _put(block, suite.body, suite.footer)

    @cached_property
    def spans(self) -> dict[cst.CSTNode, Spans]:
        """The offsets of its nodes in the code that was parsed, without the suites that were cut out."""
        filled = [(block.body, block.footer) for block in self._holes]
        for block, own in zip(self._holes, self._own, strict=True):
            _put(block, *own)
        try:
            return libcst_internals.node_spans(self.module)
        finally:
            for block, suite in zip(self._holes, filled, strict=True):
                _put(block, *suite)


class PlacedPiece:
    """A piece and its place in a statement."""

    def __init__(self, piece: Piece, cut: Cut, suites: list[PlacedPiece]) -> None:
        self.piece, self.cut, self.suites = piece, cut, suites
        self._marks = [mark.start for mark in cut.marks]
        beyond = len(cut.code) - cut.marks[-1].end if suites else 0
        self.end: int = suites[-1].end + beyond if suites else cut.start + len(cut.code)

    def spans(self, node: cst.CSTNode) -> Spans | None:
        """Return the offsets of one of its nodes in the statement; None for a node of another piece."""
        found = self.piece.spans.get(node)
        if found is None:
            return None
        first, last, outer_first, outer_last = (self._moved(offset - len(self.cut.before)) for offset in found)
        return first, last, outer_first, outer_last

    def _moved(self, offset: int) -> int:
        """Return the offset in the statement of an offset in the code that was parsed."""
        number = bisect.bisect_right(self._marks, offset) - 1
        if number < 0:
            return self.cut.start + offset
        mark, suite = self.cut.marks[number], self.suites[number]
        if offset >= mark.end:
            return suite.end + offset - mark.end
        if offset == mark.start:
            return suite.cut.start
        spans = suite.spans(suite.piece.suite)
        assert spans is not None, "every suite has a place"
        return spans[0] if offset == mark.name else spans[1]


class Tree:
    """A statement: `module`, and the offsets of its nodes. version: the mark of the version that uses it."""

    def __init__(self, placed: Sequence[PlacedPiece], version: object = None) -> None:
        self.placed, self.version = placed, version
        for each in placed:
            each.piece.user = self

    @property
    def module(self) -> cst.Module:
        return self.placed[0].piece.module

    @property
    def whole(self) -> bool:
        """True if no other tree has taken one of its pieces."""
        return all(each.piece.user is self for each in self.placed)

    def spans(self, node: cst.CSTNode) -> Spans:
        """Return the offsets of a node in the statement's code."""
        for each in self.placed:
            found = each.spans(node)
            if found is not None:
                return found
        raise KeyError(node)


def parse(code: str) -> Tree:
    """Return the tree of a statement. Raises libcst's `ParserSyntaxError`."""
    cut = Cut(0, code=code)
    return Tree([PlacedPiece(Piece(cut), cut, [])])


class FileVersion:
    """The trees of one version of a file. before: those of the last version without a syntax error."""

    def __init__(self, before: dict[str, list[Tree]]) -> None:
        self._before = before
        self._trees: dict[str, list[Tree]] = {}
        self._failed = False
        #: Marks the trees in use. Not the version itself: the trees would keep every earlier version alive.
        self._mark = object()

    @property
    def known(self) -> dict[str, list[Tree]]:
        """The trees that the next version takes over, by code."""
        return self._before if self._failed else self._trees

    def parse(self, code: str) -> Tree:
        """Return the tree of a statement, which no other statement shares. Raises libcst's `ParserSyntaxError`."""
        tree = next((each for each in self._before.get(code, ()) if self._is_free(each) and each.whole), None)
        if tree is None:
            tree = self._parsed(code)
        tree.version = self._mark
        self._trees.setdefault(code, []).append(tree)
        return tree

    def _is_free(self, tree: Tree | None) -> bool:
        return tree is None or tree.version is not self._mark

    def _parsed(self, code: str) -> Tree:
        cut = cut_suites(code)
        try:
            if cut is not None:
                placed = list(self._pieces(cut))
                return Tree(placed[::-1], self._mark)
        except cst.ParserSyntaxError:
            pass  # parsing the whole statement reports the place
        try:
            return parse(code)
        except cst.ParserSyntaxError:
            self._failed = True
            raise

    def _pieces(self, cut: Cut) -> Iterator[PlacedPiece]:
        """Yield the pieces of a cut, inner ones first; those that are not known are parsed."""
        suites = []
        for hole in cut.holes:
            inside = list(self._pieces(hole))
            yield from inside
            suites.append(inside[-1])
        free = self._free_pieces.get((cut.before, cut.code), [])
        piece = free.pop() if free else Piece(cut)
        piece.fill(each.piece for each in suites)
        yield PlacedPiece(piece, cut, suites)

    @cached_property
    def _free_pieces(self) -> dict[tuple[str, str], list[Piece]]:
        """The pieces of trees that no statement has taken yet, by their code."""
        found: dict[tuple[str, str], list[Piece]] = {}
        for trees in self._before.values():
            for tree in trees:
                for each in tree.placed if self._is_free(tree) else ():
                    if self._is_free(each.piece.user):
                        found.setdefault((each.cut.before, each.cut.code), []).append(each.piece)
        return found


class Trees:
    """The trees of the last versions of files, for a process that checks one version after another."""

    def __init__(self) -> None:
        self._last: collections.OrderedDict[str, FileVersion] = collections.OrderedDict()

    def begin(self, path: str) -> FileVersion:
        """Begin another version of a file; the version before must not be used any more."""
        before = self._last.pop(path, None)
        self._last[path] = version = FileVersion(before.known if before is not None else {})
        while len(self._last) > MOST:
            self._last.popitem(last=False)
        return version


def _blocks(statements: Iterable[cst.CSTNode]) -> Iterator[cst.IndentedBlock]:
    """Yield the suites of statements, outer ones first."""
    waiting = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, cst.IndentedBlock):
            yield node
        if isinstance(node, cst.SimpleStatementLine):
            continue
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            below = getattr(node, field, None)
            if isinstance(below, cst.CSTNode):
                waiting.append(below)
            elif below is not None:
                waiting += below


def _holes(module: cst.Module, cut: Cut) -> list[cst.IndentedBlock]:
    """Return the suites in the places of those that were cut out, in order."""
    found: dict[str, cst.IndentedBlock] = {}
    for block in _blocks(module.body):
        line = block.body[0]
        small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
        if isinstance(small, cst.Expr) and isinstance(small.value, cst.Name):
            found[small.value.value] = block
    return [found[mark.text] for mark in cut.marks]


def _put(block: cst.IndentedBlock, body: Sequence[cst.BaseStatement], footer: Sequence[cst.EmptyLine]) -> None:
    """Replace the content of a suite in place, in a tree that is not in use: libcst's nodes are frozen."""
    libcst_internals.set_fields(block, body=body, footer=footer)
