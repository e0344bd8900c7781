"""The items of mappings: what `f(**mapping)` passes as keyword arguments, and what a dict that code builds contains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program.lattice import (
    NOTHING_KNOWN,
    Alternative,
    Alternatives,
    Constant,
    DictValue,
    Function,
    Ref,
)
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import ALWAYS
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import Evaluation, ProgramView

#: How many names, calls and parameters are followed to where a mapping is made.
_DEPTH = 6
#: The most items of a dict literal that are known.
MOST_ITEMS = 64
#: Methods that change a dict.
_CHANGES = ("update", "pop", "setdefault", "clear", "popitem")

Nodes = dict[str, cst.BaseExpression]
Parts = dict[object, Callable[[], Alternatives]]


class Mappings:
    """The items that the calls of a file pass as `**mapping`."""

    def __init__(self, facts: ProgramView) -> None:
        self._facts = facts
        self._items: dict[Call, tuple[Nodes, bool]] = {}

    def items_of(self, call: Call) -> tuple[Nodes, bool]:
        """Return the items of each `**mapping` of a call, as far as they are known, and True if all are."""
        if call not in self._items:
            self._items[call] = {}, False  # while it is evaluated: it may be made of the call's result
            items = [_items(arg.value, call, self._facts) for arg in call.node.args if arg.star == "**"]
            found = {key: value for each in items if each is not None for key, value in each.items()}
            self._items[call] = found, None not in items
            if None in items and self._facts.values.is_active:  # a limit, or a cycle, may have cut off what is known
                return self._items.pop(call)
        return self._items[call]


def _items(mapping: cst.BaseExpression, at: Call, facts: ProgramView) -> Nodes | None:
    if (written := _written(mapping, at, facts)) is not None:
        return written
    path = dotted(mapping)
    later = (each for each in at.scope.bindings.get(path, ()) if each.order > at.order)
    if any(not set(each.loops).isdisjoint(at.loops) for each in later):
        return None  # the loop may give the name another value
    bindings = facts.bindings(path, at) if path else []
    made = bindings[0] if len(bindings) == 1 and bindings[0].kind == "assign" else None
    if made is not None and made.scope is at.scope and not made.guard - at.guard:
        added = additions(path, at, facts)
        if added is None or any(each.guard - at.guard or each.chunk is not at.chunk for each in added.values()):
            return None
        if made.chunk is at.chunk and (written := _written(made.value, made, facts)) is not None:
            known = all(each.order < at.order for each in added.values())
            return {**written, **{key: each.value for key, each in added.items() if each.value}} if known else None
        if added or not is_intact(made.value, made, facts):
            return None
    elif not is_intact(mapping, at, facts):
        return None
    tables = facts.evaluate(mapping, at)
    table = tables[0].atom if len(tables) == 1 and not tables[0].guard - at.guard else None
    if not isinstance(table, DictValue) or not all(isinstance(key, str) for key, _ in table.parts):
        return None
    return {str(key): _stand_in(mapping, str(key), part(), at) for key, part in table.parts}


def _stand_in(mapping: cst.BaseExpression, key: str, values: Alternatives, at: Call) -> cst.BaseExpression:
    """Return an expression for an item that the code of a call does not contain, at the place of the mapping."""
    atom = values[0].atom if len(values) == 1 and not values[0].guard else None
    if type(atom) is Constant:
        node = cst.parse_expression(repr(atom.value))
    else:
        node = cst.Subscript(mapping, [cst.SubscriptElement(cst.Index(cst.SimpleString(repr(key))))])
    at.chunk.places[node] = mapping
    return node


def _written(mapping: cst.BaseExpression | None, at: Record, facts: ProgramView) -> Nodes | None:
    """Return the items of a dict literal, or of `dict(...)`, with constant keys; None for anything else."""
    call = facts.call_of(mapping)
    if call is not None:
        is_dict = call.path == "dict" and not call.positional and not call.starred
        return dict(call.keywords) if is_dict and facts.called_path(call) == "dict" else None
    if type(mapping) is not cst.Dict:
        return None
    found: Nodes = {}
    for element in mapping.elements:
        if isinstance(element, cst.DictElement):
            key = constant(element.key)
            if key is None or not isinstance(key[0], str):
                return None
            found[key[0]] = element.value
        else:
            inner = _written(element.value, at, facts)
            if inner is None:
                return None
            found |= inner
    return found


def additions(path: str, at: Record, facts: ProgramView) -> dict[str, Binding] | None:
    """Return the items that the function of a record adds to a mapping by name, each once.

    None if the file changes it in another way, or may do so by another name.
    """
    found: dict[str, Binding] = {}
    if _is_changed_by_method(path, facts):
        return None
    for scope in facts.scopes:
        for each in scope.bindings.get(path, ()):
            if each.kind != "item":
                continue
            node = each.node
            index = node.slice[0].slice if isinstance(node, cst.Subscript) and dotted(node.value) == path else None
            key = constant(index.value) if isinstance(index, cst.Index) else None
            name = key[0] if key is not None and isinstance(key[0], str) else None
            if scope is not at.scope or name is None or name in found or each.value is None or each.index:
                return None
            found[name] = each
    bound = (each for scope in facts.scopes if found for bindings in scope.bindings.values() for each in bindings)
    return None if any(dotted(each.value) == path for each in bound) else found


def _root(node: cst.CSTNode | None) -> str:
    """Return `options` for `options["trainer"]["plugins"]`."""
    while isinstance(node, cst.Subscript):
        node = node.value
    return dotted(node)


def _is_changed_by_method(path: str, facts: ProgramView) -> bool:
    return any(_root(call.receiver) == path for name in _CHANGES for call in facts.calls.get(name, ()))


def is_changed(path: str, facts: ProgramView) -> bool:
    """True if the file changes the items of a mapping, or of a mapping in it."""
    items = (each.kind == "item" for scope in facts.scopes for each in scope.bindings.get(path, ()))
    return any(items) or _is_changed_by_method(path, facts)


def is_intact(node: cst.BaseExpression | None, at: Record, facts: ProgramView, depth: int = _DEPTH) -> bool:
    """True if a mapping has the items with which it is made, as far as the code is known."""
    if isinstance(node, cst.Subscript):
        return is_intact(node.value, at, facts, depth)
    if depth == 0 or isinstance(node, cst.Dict):
        return depth > 0
    call = facts.call_of(node)
    if call is not None:
        atoms = [each.atom for each in facts.evaluate(call.func, call)]
        given = [*call.positional[:1], *(arg.value for arg in call.node.args if arg.star)]
        if atoms == [Ref("dict")]:
            return all(is_intact(each, call, facts, depth - 1) for each in given)
        made = (each for each in atoms if isinstance(each, Function))
        returns = ((each, facts.of(f.scope)) for f in made for each in f.scope.returns)
        return all(is_intact(each.value, each, home, depth - 1) for each, home in returns)
    path = dotted(node)
    modules = (each for each in facts.bindings(path.partition(".")[0], at) if each.kind == "import")
    bindings = facts.bindings(path, at) or list(modules)
    return (
        bool(bindings) and not is_changed(path, facts) and all(_binds_intact(b, path, facts, depth) for b in bindings)
    )


def _binds_intact(binding: Binding, path: str, facts: ProgramView, depth: int) -> bool:
    if binding.kind == "assign":
        return is_intact(binding.value, binding, facts.of(binding), depth - 1)
    if binding.kind == "param":
        calls = facts.callers(binding.scope)
        if len(calls) != 1 or facts.escapes(binding.scope):
            return False
        return is_intact(facts.argument_for(calls[0], binding), calls[0], facts.of(calls[0]), depth - 1)
    if binding.kind in ("import", "from") and (home := facts.module_of(binding)) is not None:
        name = binding.name if binding.kind == "from" else path.rpartition(".")[2]
        home.need_uses(name)
        made = [each for each in home.module.bindings.get(name, ()) if each.kind != "item"]
        return not is_changed(name, home) and len(made) == 1 and _binds_intact(made[0], name, home, depth - 1)
    return False


def display(values: Evaluation, node: cst.Dict, scope: Scope, order: int) -> Alternatives:
    """Return the value of a dict literal whose keys are constants, with the items of the dicts that it unpacks."""
    parts: Parts = {}
    for element in node.elements:
        key = constant(element.key) if isinstance(element, cst.DictElement) else None
        if key is not None:
            parts[key[0]] = functools.partial(values.evaluate, element.value, scope, order)
        elif type(element) is cst.DictElement or not _parts(values.evaluate(element.value, scope, order), parts):
            return NOTHING_KNOWN
    return (Alternative(ALWAYS, DictValue(tuple(parts.items()))),)


def of_dict_call(call: Call, facts: ProgramView) -> Alternatives:
    """Return the value of `dict(mapping, name=value, ...)`; nothing if its items are not all known."""
    parts: Parts = {}
    if call.starred or not all(_parts(facts.evaluate(each, call), parts) for each in call.positional):
        return ()
    parts |= {name: functools.partial(facts.evaluate, value, call) for name, value in call.keywords.items()}
    return (Alternative(ALWAYS, DictValue(tuple(parts.items()))),)


def _parts(mapping: Alternatives, into: Parts) -> bool:
    """Add the items of a mapping; False if they are not known."""
    table = mapping[0].atom if len(mapping) == 1 else None
    if isinstance(table, DictValue):
        into.update(table.parts)
    return isinstance(table, DictValue)
