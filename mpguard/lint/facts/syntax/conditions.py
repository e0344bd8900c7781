"""Translates test expressions into conditions over flags.

Examples: `args.fp16 and not cpu`, `dtype == "bf16"`, `p in ("16", "bf16")`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst

from mpguard.lint.facts.syntax.nodes import constant, dotted, text_of
from mpguard.lint.facts.syntax.path_condition import (
    MOST_FLAGS,
    All,
    Any,
    Condition,
    Fixed,
    Flag,
    PathCondition,
    negated,
)
from mpguard.lint.facts.syntax.records import Scope

_EQUAL: frozenset[type] = frozenset({cst.Is, cst.Equal})
_EQUALITY = _EQUAL | {cst.IsNot, cst.NotEqual}
_MEMBERSHIP: frozenset[type] = frozenset({cst.In, cst.NotIn})
#: Attributes that have different meanings in different objects of a program.
_COMMON = frozenset({"type", "name", "kind"})


class Conditions:
    """The conditions of one file."""

    def __init__(self) -> None:
        #: The formula of each `and`/`or` expression, which is needed again for each of its operators; cleared when a
        #: name is bound to a new condition.
        self._formulas: dict[cst.CSTNode, Condition] = {}

    def name(self, key: str, node: cst.CSTNode, holder: Scope, scope: Scope) -> None:
        """Record a name that is bound to a condition (`use_amp = args.fp16 and cuda`).

        From here on the name stands for that condition. So does one that is bound to an object or None
        (`scaler = GradScaler() if args.fp16 else None`).
        """
        condition = self.of(node, scope) if _is_formula(node) else self._exists(node, scope)
        if condition is None:
            return
        if key.rsplit(".", 1)[-1] not in PathCondition([condition]).flags():
            holder.conditions[key] = condition
            self._formulas.clear()

    def _exists(self, node: cst.CSTNode, scope: Scope) -> Condition | None:
        """Return the condition under which a choice of a new object or None is the object; None for all else."""
        if type(node) is not cst.IfExp:
            return None
        if _is_new_object(node.body) and constant(node.orelse) == (None,):
            return self.of(node.test, scope)
        if _is_new_object(node.orelse) and constant(node.body) == (None,):
            return negated(self.of(node.test, scope))
        return None

    def of(self, node: cst.CSTNode, scope: Scope) -> Condition:
        """Return the formula for the truth of an expression in a scope."""
        known = constant(node)
        if known is not None:
            return Fixed(bool(known[0]))
        path = dotted(node)
        if path:
            bases: Iterable[Scope] = _bases(scope.owner) if path.startswith("self.") else ()
            for place in (*scope.within(), *bases):
                if path in place.conditions:
                    return place.conditions[path]
            return Flag(path.rsplit(".", 1)[-1])
        if type(node) is cst.UnaryOperation and type(node.operator) is cst.Not:
            return negated(self.of(node.expression, scope))
        if type(node) is cst.BooleanOperation:
            if node not in self._formulas:
                self._formulas[node] = self._formula(node, scope)
            return self._formulas[node]
        if type(node) is cst.Comparison and len(node.comparisons) == 1:
            return self._comparison(node, scope)
        if type(node) is cst.Call:
            name = dotted(node.func).rsplit(".", 1)[-1]
            args = [arg.value for arg in node.args]
            if name == "bool" and len(args) == 1:
                return self.of(args[0], scope)
            key = constant(args[1 if name == "getattr" else 0]) if len(args) > (name == "getattr") else None
            if name in ("getattr", "get") and key and isinstance(key[0], str):
                return Flag(key[0])
        return Flag(subject(node))

    def _formula(self, node: cst.BooleanOperation, scope: Scope) -> Condition:
        parts = (self.of(node.left, scope), self.of(node.right, scope))
        if sum(part.leaves for part in parts) > MOST_FLAGS:
            return Flag(text_of(node))
        return All(parts) if type(node.operator) is cst.And else Any(parts)

    def _comparison(self, node: cst.Comparison, scope: Scope) -> Condition:
        operator, right = node.comparisons[0].operator, node.comparisons[0].comparator
        if type(operator) in _EQUALITY:
            found = self._equal(node.left, right, scope)
            if found is not None:
                return found if type(operator) in _EQUAL else negated(found)
        if type(operator) in _MEMBERSHIP and isinstance(right, (cst.Tuple, cst.List, cst.Set)):
            equal = [self._equal(node.left, each.value, scope) for each in right.elements]
            parts = tuple(each for each in equal if each is not None)
            if len(parts) == len(equal):
                return Any(parts) if type(operator) is cst.In else negated(Any(parts))
        return Flag(text_of(node))

    def _equal(self, node: cst.BaseExpression, other: cst.BaseExpression, scope: Scope) -> Condition | None:
        """Return the condition that an expression equals a constant or a member of an enum; None for all else."""
        value = constant(other)
        if value is None:
            member = _member(other)
            return Flag(subject(node), member[0]) if member else None
        if value[0] is None or isinstance(value[0], bool):
            return self.of(node, scope) if value[0] else negated(self.of(node, scope))
        return Flag(subject(node), value[0])


def _bases(owner: Scope | None, depth: int = 4) -> Iterator[Scope]:
    """Yield the classes of the file that a class derives from, by the names of the bases."""
    if owner is None or owner.parent is None or not depth:
        return
    for each in owner.parent.children:
        if each.kind == "class" and each is not owner and each.name in owner.base_names:
            yield each
            yield from _bases(each, depth - 1)


def subject(node: cst.CSTNode) -> str:
    """Return the flag that a comparison tests: the last name of the expression, its string key, or its text.

    An attribute that objects of many kinds have goes with the name of its object: `device.type`.
    """
    path = dotted(node)
    if path:
        *owners, name = path.split(".")
        return ".".join([*owners[-1:], name]) if name in _COMMON else name
    if type(node) is cst.Subscript and len(node.slice) == 1 and type(node.slice[0].slice) is cst.Index:
        key = constant(node.slice[0].slice.value)
        if key and isinstance(key[0], str):
            return key[0]
    return text_of(node)


def _member(node: cst.CSTNode) -> tuple[str, ...]:
    """Return the last name of the other operand (an enum's member, a dtype) in a tuple; empty for other expressions."""
    path = dotted(node)
    return (path.rsplit(".", 1)[-1],) if path else ()


def _is_new_object(node: cst.CSTNode) -> bool:
    """True for a call of a class, by its name: `torch.amp.GradScaler("cuda")`."""
    return type(node) is cst.Call and dotted(node.func).rsplit(".", 1)[-1][:1].isupper()


def _is_formula(node: cst.CSTNode) -> bool:
    """True if an expression is a condition over flags that is worth recording for the name that it is bound to."""
    if type(node) is cst.Comparison:
        return True
    if type(node) is cst.BooleanOperation:
        return _is_formula(node.left) or _is_formula(node.right) or bool(dotted(node.left))
    if type(node) is cst.UnaryOperation:
        return type(node.operator) is cst.Not
    if type(node) is cst.Call:
        return dotted(node.func) in ("bool", "getattr")
    path = dotted(node)
    return bool(path) and constant(node) is None
