"""The keyword arguments of a call, with those of its `**mapping`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program.lattice import Alternatives, DictValue
from mpguard.lint.facts.program.mappings import additions
from mpguard.lint.facts.syntax.nodes import dotted

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView
    from mpguard.lint.facts.syntax.records import Binding, Call, Record

#: How many functions that pass on their `**kwargs` are followed, and the most ways in which a call is followed.
_DEPTH, _MOST_WAYS = 4, 16

#: Keyword arguments by name; each is evaluated on demand.
Keywords = dict[str, Callable[[], Alternatives]]


def passed(call: Call, facts: ProgramView, depth: int = _DEPTH) -> list[Keywords] | None:
    """Return the keyword arguments that a call may pass, for each way to it; None if they are not all known.

    `**options` passes the items of a dict with constant keys, and perhaps those that the function adds to it
    (`options["log_with"] = ...`). `**kwargs` passes what the calls of its function pass, if these are all known.
    """
    if depth < 0 or any(arg.star == "*" for arg in call.node.args):
        return None
    ways: list[Keywords] = [
        {name: functools.partial(facts.evaluate, value, call) for name, value in call.keywords.items()}
    ]
    for arg in call.node.args:
        if arg.star == "**":
            further = _items(arg.value, call, facts, depth)
            if further is None or len(ways) * len(further) > _MOST_WAYS:
                return None
            ways = [{**way, **more} for way in ways for more in further]
    return ways


def _items(mapping: cst.BaseExpression, at: Record, facts: ProgramView, depth: int) -> list[Keywords] | None:
    """Return the items of a mapping, for each value that it may have."""
    path = dotted(mapping)
    bound = additions(path, at, facts) if path else {}
    known = _unchanged(mapping, at, facts, depth) if bound is not None else None
    added: Keywords = {key: functools.partial(facts.evaluate, each.value, each) for key, each in (bound or {}).items()}
    return [*known, *({**each, **added} for each in known)] if known and added else known


def _unchanged(mapping: cst.BaseExpression, at: Record, facts: ProgramView, depth: int) -> list[Keywords] | None:
    """Return the items that a mapping has where it is made, for each value that it may have."""
    path = dotted(mapping)
    inner = facts.call_of(mapping)
    if inner is not None and inner.path == "dict" and not inner.positional:
        return passed(inner, facts, depth - 1)
    bindings = facts.bindings(path, at) if path else []
    if len(bindings) == 1 and bindings[0].kind == "assign" and isinstance(bindings[0].value, cst.Call):
        return _items(bindings[0].value, bindings[0], facts.of(bindings[0]), depth - 1) if depth else None
    if len(bindings) == 1 and _is_kwargs(bindings[0]):
        return _kwargs(bindings[0], facts, depth)
    tables = [each.atom for each in facts.evaluate(mapping, at)]
    found = [
        {key: part for key, part in table.parts if isinstance(key, str)}
        for table in tables
        if isinstance(table, DictValue)
    ]
    return found if len(found) == len(tables) else None


def _is_kwargs(binding: Binding) -> bool:
    params = binding.scope.params
    return binding.kind == "param" and any(each.name == binding.key and each.kind == "double" for each in params)


def _kwargs(binding: Binding, facts: ProgramView, depth: int) -> list[Keywords] | None:
    """Return what the calls of a function pass for its `**kwargs`."""
    scope = binding.scope
    calls = facts.callers(scope)
    if not calls or facts.escapes(scope):
        return None
    named = {each.name for each in scope.params}
    found: list[Keywords] = []
    for call in calls:
        ways = passed(call, facts.of(call), depth - 1)
        if ways is None:
            return None
        found += [{name: value for name, value in way.items() if name not in named} for way in ways]
    return found


def alternatives_of(call: Call, name: str, facts: ProgramView) -> Alternatives:
    """Return the alternatives of a keyword argument of a call of a file: by its name, or in a `**mapping`."""
    if (given := call.keywords.get(name)) is not None:
        return facts.evaluate(given, call)
    mappings = [arg.value for arg in call.node.args if arg.star == "**"]
    key = cst.SimpleString(repr(name))
    return tuple(p for each in mappings for p in facts.values.item(each, key, call.scope, call.order))
