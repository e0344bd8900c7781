"""libcst's parser, and where the nodes that it makes stand."""

from __future__ import annotations

import sys
from typing import Any

import libcst as cst
from libcst._nodes.internal import CodegenState

#: Enough for `depth.MOST_TERMS`, a few Python frames each.
_FRAMES = 12_000

#: Where a node stands: without parentheses around it; and with them, a statement with the comments above and the
#: line's end.
Spans = tuple[int, int, int, int]


_CHECK_NODE = cst.CSTNode.__post_init__


def parsed(text: str) -> cst.Module:
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


def spans(module: cst.Module) -> dict[cst.CSTNode, Spans]:
    """Where the nodes of a tree stand in its code."""
    state = _Positions(module.default_indent, module.default_newline)
    with Frames():
        module._codegen(state)
    return state.spans


class _Positions(CodegenState):
    """Writes code, and remembers for each node the offsets between which it was written."""

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
