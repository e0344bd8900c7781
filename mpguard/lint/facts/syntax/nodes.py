"""Helpers for LibCST nodes: dotted names, literals, code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import libcst as cst

from mpguard.lint.source.libcst_internals import node_code


def dotted(node: cst.CSTNode | None) -> str:
    """Return `a.b.c` for a chain of names; an empty string for any other node."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return ""
    parts.append(node.value)
    return ".".join(reversed(parts))


def text_of(node: cst.CSTNode) -> str:
    """Return the code of a node without white space; equal conditions have equal texts."""
    return "".join(node_code(node).split())


def constant(node: cst.CSTNode | None) -> tuple[object] | None:
    """Return the value of a literal in a tuple (None is a literal too); None for any other node."""
    if isinstance(node, cst.Name):
        return {"True": (True,), "False": (False,), "None": (None,)}.get(node.value)
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        value = node.evaluated_value
        return (value,) if isinstance(value, str) else None
    if isinstance(node, (cst.Integer, cst.Float)):
        return (node.evaluated_value,)
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        inner = constant(node.expression)
        return (-inner[0],) if inner and isinstance(inner[0], (int, float)) else None
    return None


_SKIPPED = (
    "whitespace", "lpar", "rpar", "comma", "equal", "semicolon", "operator", "lbrace", "rbrace", "lbracket",
    "rbracket",
    "leading_lines", "trailing_whitespace", "header", "footer", "colon", "dot", "star", "annotation",
)  # fmt: skip


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields of a node type that can hold expressions."""
    return tuple(f.name for f in dataclasses.fields(kind) if not f.name.startswith(_SKIPPED))


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the children of a node that can hold expressions."""
    for field in _fields(type(node)):
        value = getattr(node, field)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, (list, tuple)):
            for each in value:
                if isinstance(each, cst.CSTNode):
                    yield each


def ends_process(node: cst.CSTNode) -> bool:
    """True if a call ends the process, so that no code after it runs."""
    return isinstance(node, cst.Call) and dotted(node.func) in ("sys.exit", "exit", "quit", "os._exit", "os.abort")


def assigned(node: cst.CSTNode) -> set[str]:
    """Return the last names of the targets that are assigned within a compound statement."""
    found: set[str] = set()
    stack: list[cst.CSTNode] = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, cst.SimpleStatementLine):
            for statement in current.body:
                targets = [t.target for t in statement.targets] if isinstance(statement, cst.Assign) else []
                if isinstance(statement, cst.AnnAssign):
                    targets = [statement.target]
                for target in targets:
                    elements = (
                        [e.value for e in target.elements] if isinstance(target, (cst.Tuple, cst.List)) else [target]
                    )
                    found.update(dotted(each).rsplit(".", 1)[-1] for each in elements)
        elif isinstance(
            current,
            (cst.If, cst.For, cst.While, cst.With, cst.Try, cst.TryStar, cst.Else, cst.Finally, cst.ExceptHandler),
        ):
            stack.append(current.body)
            for field in ("orelse", "finalbody"):
                other = getattr(current, field, None)
                if other is not None:
                    stack.append(other)
            stack += getattr(current, "handlers", ())
        elif isinstance(current, cst.IndentedBlock):
            stack += current.body
    return found - {""}
