"""The private parts of libcst that the linter uses, behind named functions. No other module touches one.

- `CSTNode.__post_init__`: replaced, so that nodes which a thread creates while it parses are not validated
  (`parse_module`).
- `libcst._nodes.internal.CodegenState` and `CSTNode._codegen`: the positions of nodes (`node_spans`), and their code
  without positions (`node_code`).
- Nodes are frozen dataclasses: `set_fields` writes their fields all the same. The linter itself imports libcst through
  this module, which leaves out what makes that import slow (`_plain_dataclasses`); where another module of the process
  has imported libcst before, the classes are as libcst defines them.

A minor release of libcst may change any of them. `pyproject.toml` therefore has an upper bound for libcst, and
tests/lint/source/test_libcst_internals.py names the part that differs; run it before the bound is raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

# -- import -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _plain_dataclasses() -> Iterator[None]:
    """Define the node classes of libcst without the methods that the linter has no use for, while it is imported.

    `dataclass` discards `__repr__` and `__eq__` after it has compiled them: `CSTNode` gives each class its own. A
    frozen class has a `__setattr__` and a `__delattr__` that raise, and an `__init__` that is slower because of them.
    Without these, libcst is imported in 60 % of the time, and parses in 90 %. Nodes are equal by identity: `object`
    compares them as `CSTNode` does, without a call of a Python function for each look-up in a dict.
    """
    original = dataclasses.dataclass

    def plain(cls: type | None = None, /, **options: Any) -> Any:
        def decorate(cls: type) -> type:
            if cls.__module__.startswith("libcst._nodes.") and {"__repr__", "__eq__", "__hash__"} <= vars(cls).keys():
                options.update(repr=False, eq=False, frozen=False)
                if cls.__name__ == "CSTNode":  # which the other classes take them from
                    cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__  # type: ignore[assignment, method-assign]
            return original(cls, **options)

        return decorate if cls is None else decorate(cls)

    dataclasses.dataclass = plain
    try:
        yield
    finally:
        dataclasses.dataclass = original


with _plain_dataclasses():
    import libcst as cst
    from libcst._nodes.internal import CodegenState

#: Enough for `parser_limits.MOST_TERMS`, a few Python frames each.
_FRAMES = 12_000

#: The offsets of a node: start and end without the parentheses around it; start and end with them, and for a statement
#: with the comments above it and the end of its line.
Spans = tuple[int, int, int, int]

# -- parsing ----------------------------------------------------------------------------------------

_VALIDATE = cst.CSTNode.__post_init__
#: The threads that are parsing, by identifier, and how many calls of `parse_module` each is in.
_parsing: Counter[int] = Counter()


def parse_module(text: str) -> cst.Module:
    """Return the tree of some code, without validating its nodes. Raises libcst's `ParserSyntaxError`.

    Validation rejects code that Python accepts (`return.5`), and takes a tenth of the time.
    """
    with _without_validation(), Frames():
        return cst.parse_module(text)


@contextlib.contextmanager
def _without_validation() -> Iterator[None]:
    """Turn off the validation of nodes that this thread creates; libcst's parser has no option for it."""
    thread = threading.get_ident()
    _parsing[thread] += 1
    try:
        yield
    finally:
        _parsing[thread] -= 1
        if not _parsing[thread]:
            del _parsing[thread]


def _validate(self: cst.CSTNode) -> None:
    """Take the place of `CSTNode.__post_init__`, which the parser calls for every node."""
    if threading.get_ident() not in _parsing:
        _VALIDATE(self)


# Once and for all: each change of a class discards what Python has cached about it and the 250 classes below it.
cst.CSTNode.__post_init__ = _validate  # type: ignore[method-assign]


class Frames:
    """Raise Python's recursion limit within a `with` block: long expressions are deep trees."""

    def __enter__(self) -> None:
        self.before = sys.getrecursionlimit()
        if self.before < _FRAMES:
            sys.setrecursionlimit(_FRAMES)

    def __exit__(self, *error: object) -> None:
        if self.before < _FRAMES:
            sys.setrecursionlimit(self.before)


# -- frozen nodes -----------------------------------------------------------------------------------


def set_fields(node: cst.CSTNode, **fields: object) -> None:
    """Write fields of a node in place; `with_changes` would copy the node, and its identity is the key of all facts."""
    for name, value in fields.items():
        object.__setattr__(node, name, value)


# -- code and positions -----------------------------------------------------------------------------


def node_code(node: cst.CSTNode) -> str:
    """Return the code of a node; in two thirds of the time of the public `Module.code_for_node`."""
    state = _CodeOnly("    ", "\n")
    node._codegen(state)
    return "".join(state.tokens)


_NO_POSITION = contextlib.nullcontext()


class _CodeOnly(CodegenState):
    """Generates code without the context manager that libcst creates for the position of each node."""

    def record_syntactic_position(self, node: Any, **_: Any) -> Any:  # noqa: ARG002
        return _NO_POSITION


def node_spans(module: cst.Module) -> dict[cst.CSTNode, Spans]:
    """Return the offsets of all nodes of a tree in its code.

    libcst's `PositionProvider` and `WhitespaceInclusivePositionProvider` copy the tree, take a pass each, and return
    lines and columns.
    """
    state = _Positions(module.default_indent, module.default_newline)
    with Frames():
        module._codegen(state)
    return state.spans


class _Positions(CodegenState):
    """Generates code and records, for each node, the offsets between which its code is."""

    def __init__(self, default_indent: str, default_newline: str) -> None:
        super().__init__(default_indent, default_newline)
        self.offset = 0
        self.open: list[int] = []
        self.exact: dict[cst.CSTNode, tuple[int, int]] = {}
        self.spans: dict[cst.CSTNode, Spans] = {}

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
        return _SyntacticPosition(self, node, start_node, end_node)


class _SyntacticPosition:
    """Records the offsets of a node without its parentheses, comments and line end."""

    def __init__(self, state: _Positions, node: cst.CSTNode, start: Any, end: Any) -> None:
        self.state, self.node, self.start, self.end = state, node, start, end

    def __enter__(self) -> None:
        self.first = self.state.offset

    def __exit__(self, *error: object) -> None:
        spans = self.state.spans
        first = spans[self.start][0] if self.start in spans else self.first
        last = spans[self.end][1] if self.end in spans else self.state.offset
        self.state.exact[self.node] = (first, last)
