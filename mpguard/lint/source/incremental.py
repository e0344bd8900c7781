"""Trees of statements, kept for the next version of a file: who types changes one suite, and parsing is half of all.

Facts are kept by node, so a tree serves one version at a time: the next one takes it over, as it is or with other
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
from mpguard.lint.source.suites import Cut, cut

#: Files whose trees are kept: a tree is some hundred times its text.
MOST = 8


class Piece:
    """Some code, parsed by itself: a statement, or a suite of one. Suites that were cut out of it are put in later.

    user: the tree that it is part of, or was.
    """

    def __init__(self, made: Cut) -> None:
        self.module = libcst_internals.parse_module(made.before + made.code)
        self.user: Tree | None = None
        self.depth = made.depth
        self._holes = _holes(self.module, made) if made.holes else []
        self._own = [(block.body, block.footer) for block in self._holes]

    @property
    def suite(self) -> cst.IndentedBlock:
        """Of one that is a suite: in an `if`, or in one that is in another."""
        block = next(_blocks(self.module.body[-1:]))
        return next(_blocks(block.body)) if self.depth == 2 else block

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Puts suites where they were cut out."""
        for block, piece in zip(self._holes, pieces, strict=True):
            suite = piece.suite
            _put(block, suite.body, suite.footer)

    @cached_property
    def spans(self) -> dict[cst.CSTNode, Spans]:
        """Where its nodes stand in the code that was parsed, with suites that were cut out still out."""
        filled = [(block.body, block.footer) for block in self._holes]
        for block, own in zip(self._holes, self._own, strict=True):
            _put(block, *own)
        try:
            return libcst_internals.node_spans(self.module)
        finally:
            for block, suite in zip(self._holes, filled, strict=True):
                _put(block, *suite)


class PlacedPiece:
    """A piece in its place in a statement."""

    def __init__(self, piece: Piece, made: Cut, suites: list[PlacedPiece]) -> None:
        self.piece, self.made, self.suites = piece, made, suites
        self._marks = [mark.start for mark in made.marks]
        beyond = len(made.code) - made.marks[-1].end if suites else 0
        self.end: int = suites[-1].end + beyond if suites else made.start + len(made.code)

    def spans(self, node: cst.CSTNode) -> Spans | None:
        """Where one of its nodes stands in the statement."""
        found = self.piece.spans.get(node)
        if found is None:
            return None
        first, last, outer_first, outer_last = (self._moved(offset - len(self.made.before)) for offset in found)
        return first, last, outer_first, outer_last

    def _moved(self, offset: int) -> int:
        number = bisect.bisect_right(self._marks, offset) - 1
        if number < 0:
            return self.made.start + offset
        mark, suite = self.made.marks[number], self.suites[number]
        if offset >= mark.end:
            return suite.end + offset - mark.end
        if offset == mark.start:
            return suite.made.start
        spans = suite.spans(suite.piece.suite)
        assert spans is not None, "a suite stands somewhere"
        return spans[0] if offset == mark.name else spans[1]


class Tree:
    """A statement: `module`, and where its nodes stand in its code. version: the mark of the one that it serves."""

    def __init__(self, placed: Sequence[PlacedPiece], version: object = None) -> None:
        self.placed, self.version = placed, version
        for each in placed:
            each.piece.user = self

    @property
    def module(self) -> cst.Module:
        return self.placed[0].piece.module

    @property
    def whole(self) -> bool:
        """Whether no other tree has taken a piece of it."""
        return all(each.piece.user is self for each in self.placed)

    def spans(self, node: cst.CSTNode) -> Spans:
        for each in self.placed:
            found = each.spans(node)
            if found is not None:
                return found
        raise KeyError(node)


def parse(code: str) -> Tree:
    """The tree of a statement; raises libcst's `ParserSyntaxError`."""
    made = Cut(0, code=code)
    return Tree([PlacedPiece(Piece(made), made, [])])


class Version:
    """The trees of one version of a file. before: those of the last one that was parsed to its end."""

    def __init__(self, before: dict[str, list[Tree]]) -> None:
        self._before = before
        self._made: dict[str, list[Tree]] = {}
        self._failed = False
        #: Marks what is in use. Not the version itself: trees of the one before would keep alive all there ever were.
        self._mark = object()

    @property
    def known(self) -> dict[str, list[Tree]]:
        """What the next version takes over, by code."""
        return self._before if self._failed else self._made

    def parse(self, code: str) -> Tree:
        """The tree of a statement, which no other statement has; raises libcst's `ParserSyntaxError`."""
        tree = next((each for each in self._before.get(code, ()) if self._is_free(each) and each.whole), None)
        if tree is None:
            tree = self._parsed(code)
        tree.version = self._mark
        self._made.setdefault(code, []).append(tree)
        return tree

    def _is_free(self, tree: Tree | None) -> bool:
        return tree is None or tree.version is not self._mark

    def _parsed(self, code: str) -> Tree:
        made = cut(code)
        try:
            if made is not None:
                placed = list(self._pieces(made))
                return Tree(placed[::-1], self._mark)
        except cst.ParserSyntaxError:
            pass  # it is said where, in the whole of the statement
        try:
            return parse(code)
        except cst.ParserSyntaxError:
            self._failed = True
            raise

    def _pieces(self, made: Cut) -> Iterator[PlacedPiece]:
        """A piece and those in it, which come first; what is not known is parsed."""
        suites = []
        for hole in made.holes:
            inside = list(self._pieces(hole))
            yield from inside
            suites.append(inside[-1])
        free = self._free_pieces.get((made.before, made.code), [])
        piece = free.pop() if free else Piece(made)
        piece.fill(each.piece for each in suites)
        yield PlacedPiece(piece, made, suites)

    @cached_property
    def _free_pieces(self) -> dict[tuple[str, str], list[Piece]]:
        """Those of trees that have not been taken yet."""
        found: dict[tuple[str, str], list[Piece]] = {}
        for trees in self._before.values():
            for tree in trees:
                for each in tree.placed if self._is_free(tree) else ():
                    if self._is_free(each.piece.user):
                        found.setdefault((each.made.before, each.made.code), []).append(each.piece)
        return found


class Trees:
    """What was parsed of the last versions of files, for a process that checks them again and again."""

    def __init__(self) -> None:
        self._last: collections.OrderedDict[str, Version] = collections.OrderedDict()

    def begin(self, path: str) -> Version:
        """Another version of a file is to be checked; nothing that is known of the one before is used any more."""
        before = self._last.pop(path, None)
        self._last[path] = made = Version(before.known if before is not None else {})
        while len(self._last) > MOST:
            self._last.popitem(last=False)
        return made


def _blocks(statements: Iterable[cst.CSTNode]) -> Iterator[cst.IndentedBlock]:
    """The suites of statements, each before those in it."""
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


def _holes(module: cst.Module, made: Cut) -> list[cst.IndentedBlock]:
    """The suites that stand for what was cut out, in order."""
    found: dict[str, cst.IndentedBlock] = {}
    for block in _blocks(module.body):
        line = block.body[0]
        small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
        if isinstance(small, cst.Expr) and isinstance(small.value, cst.Name):
            found[small.value.value] = block
    return [found[mark.text] for mark in made.marks]


def _put(block: cst.IndentedBlock, body: Sequence[cst.BaseStatement], footer: Sequence[cst.EmptyLine]) -> None:
    """Another content for a suite of a tree that nobody uses yet, or any more: libcst's nodes are frozen."""
    libcst_internals.set_fields(block, body=body, footer=footer)
