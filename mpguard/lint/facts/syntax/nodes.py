"""Helpers for LibCST nodes: dotted names, literals, code.

They compare types: LibCST's nodes are abstract base classes, of which `isinstance` takes ten times as long where it is
False, and no node class of a tree has subclasses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import libcst as cst

from mpguard.lint.source.libcst_internals import node_code


def dotted(node: cst.CSTNode | None) -> str:
    """Return `a.b.c` for a chain of names; an empty string for any other node."""
    if type(node) is cst.Name:
        return node.value
    parts: list[str] = []
    while type(node) is cst.Attribute:
        parts.append(node.attr.value)
        node = node.value
    if not parts or type(node) is not cst.Name:
        return ""
    parts.append(node.value)
    return ".".join(reversed(parts))


def is_super(node: cst.CSTNode | None) -> bool:
    """True for `super()`, with or without arguments."""
    return isinstance(node, cst.Call) and dotted(node.func) == "super"


def text_of(node: cst.CSTNode) -> str:
    """Return the code of a node without white space; equal conditions have equal texts."""
    return "".join(node_code(node).split())


def constant(node: cst.CSTNode | None) -> tuple[object] | None:
    """Return the value of a literal in a tuple (None is a literal too); None for any other node."""
    if type(node) is cst.Name:
        return _KEYWORDS.get(node.value)
    if type(node) is cst.SimpleString:
        return _text_constant(node.value)
    if type(node) is cst.ConcatenatedString:
        value = node.evaluated_value
        return (value,) if isinstance(value, str) else None
    if type(node) is cst.Integer or type(node) is cst.Float:
        return (node.evaluated_value,)
    if type(node) is cst.UnaryOperation and type(node.operator) is cst.Minus:
        inner = constant(node.expression)
        return (-inner[0],) if inner and isinstance(inner[0], (int, float)) else None
    return None


@functools.lru_cache(maxsize=1024)
def _text_constant(literal: str) -> tuple[object] | None:
    """Return the value of a string literal, which Python's own parser reads; None for bytes."""
    value = cst.SimpleString(literal).evaluated_value
    return (value,) if isinstance(value, str) else None


_KEYWORDS: dict[str, tuple[object]] = {"True": (True,), "False": (False,), "None": (None,)}
_SKIPPED = (
    "whitespace", "lpar", "rpar", "comma", "equal", "semicolon", "operator", "lbrace", "rbrace", "lbracket",
    "rbracket",
    "leading_lines", "trailing_whitespace", "header", "footer", "colon", "dot", "star", "annotation",
)  # fmt: skip


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields of a node type that can hold expressions."""
    return tuple(f.name for f in dataclasses.fields(kind) if not f.name.startswith(_SKIPPED))


@functools.cache
def _is_node(kind: type) -> bool:
    return issubclass(kind, cst.CSTNode)


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the children of a node that can hold expressions."""
    for field in _fields(type(node)):
        value: Any = getattr(node, field)
        kind: Any = type(value)
        if _is_node(kind):
            yield value
        elif kind is tuple or kind is list:
            for each in value:
                kind = type(each)
                if _is_node(kind):
                    yield each


def ends_process(node: cst.CSTNode) -> bool:
    """True if a call ends the process, so that no code after it runs."""
    return type(node) is cst.Call and dotted(node.func) in ("sys.exit", "exit", "quit", "os._exit", "os.abort")


def assigned(node: cst.If) -> set[str]:
    """Return the last names of the targets that are assigned within an `if`.

    What gets the value that is tested keeps it: `if a.dtype == "fp16": b.dtype = a.dtype`.
    """
    found: set[str] = set()
    tested = dotted(node.test.left if type(node.test) is cst.Comparison else node.test)
    stack: list[cst.CSTNode] = [node]
    while stack:
        current = stack.pop()
        if type(current) is cst.SimpleStatementLine:
            for statement in current.body:
                if tested and type(statement) is cst.Assign and dotted(statement.value) == tested:
                    continue
                for target in _targets(statement):
                    found.update(dotted(each).rsplit(".", 1)[-1] for each in _elements(target))
        elif type(current) is cst.IndentedBlock:
            stack += current.body
        elif type(current) in _COMPOUND:
            for field in ("body", "orelse", "finalbody"):
                other = getattr(current, field, None)
                if other is not None:
                    stack.append(other)
            stack += getattr(current, "handlers", ())
    return found - {""}


_COMPOUND: frozenset[type] = frozenset(
    {cst.If, cst.For, cst.While, cst.With, cst.Try, cst.TryStar, cst.Else, cst.Finally, cst.ExceptHandler}
)


def _targets(statement: cst.CSTNode) -> list[cst.BaseAssignTargetExpression]:
    if type(statement) is cst.Assign:
        return [each.target for each in statement.targets]
    return [statement.target] if type(statement) is cst.AnnAssign else []


def _elements(target: cst.BaseAssignTargetExpression) -> list[cst.BaseExpression]:
    if type(target) is cst.Tuple or type(target) is cst.List:
        return [each.value for each in target.elements]
    return [target]


def iterated(node: cst.CSTNode | None) -> cst.CSTNode | None:
    """Return the object over whose parts a loop runs: `model` in `enumerate(model.layers)` and `model.children()`."""
    while isinstance(node, (cst.Call, cst.Attribute)):
        if isinstance(node, cst.Attribute):
            node = node.value
        elif isinstance(node.func, cst.Attribute):
            node = node.func.value
        elif node.args:
            node = node.args[0].value
        else:
            return None
    return node
