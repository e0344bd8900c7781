"""The dtype of parameters that a module creates: a dtype, or that of a layer of the model that it is added to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.dtypes import AnyDtype, PossibleDtypes
from mpguard.lint.facts.program.lattice import Object
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import ALWAYS, PathCondition
from mpguard.lint.facts.syntax.records import Call, Record
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: How deep the model of a layer is followed through loops, parameters and calls.
_DEPTH = 10
_CASTS = {"half": Dtype.FP16, "bfloat16": Dtype.BF16}
_QUANTIZES = ("quantization_config", "load_in_8bit", "load_in_4bit")


def of_layer(call: Call, facts: BehaviourView) -> PossibleDtypes:
    """Return the dtypes in which a call of a layer of torch creates its weights; nothing without the argument."""
    given = call.keywords.get("dtype")
    return _of(given, call, facts) if given is not None else ()


def of_parameter(call: Call, facts: BehaviourView) -> PossibleDtypes:
    """Return the dtypes of `nn.Parameter(...)`: of the tensor that it gets, `torch.randn(8, dtype=...) * 0.02`."""
    node = call.argument(0, "data")
    while node is not None:
        if isinstance(node, cst.BinaryOperation):
            node = node.left
            continue
        inner = facts.call_of(node)
        if inner is None:
            break
        if (given := inner.keywords.get("dtype")) is not None:
            return _of(given, inner, facts)
        if inner.name in _CASTS and not inner.node.args:
            return ((ALWAYS, _CASTS[inner.name]),)
        node = inner.receiver
    return ()


def loaded(
    node: cst.CSTNode | None, at: Record, facts: BehaviourView
) -> Iterator[tuple[PathCondition, AnyDtype | None, Call]]:
    """Yield the dtypes in which a model may be loaded, each with its path condition and the call that loads it."""
    for load in dict.fromkeys(_loads_of(node, at, facts, _DEPTH)):
        given = load.argument(None, "dtype", "torch_dtype")
        for guard, dtype in facts.of(load).dtypes(given, load, strings=True) if given is not None else ():
            yield guard, dtype, load


def _of(given: cst.BaseExpression, at: Call, facts: BehaviourView) -> PossibleDtypes:
    known = facts.dtypes(given, at)
    if any(dtype is not None for _, dtype in known) or not dotted(given).endswith(".weight.dtype"):
        return known
    assert isinstance(given, cst.Attribute)
    assert isinstance(given.value, cst.Attribute)
    found = loaded(given.value.value, at, facts)
    return tuple((guard, dtype) for guard, dtype, load in found if load.keywords.keys().isdisjoint(_QUANTIZES))


def _loads_of(node: cst.CSTNode | None, at: Record, facts: BehaviourView, depth: int) -> Iterator[Call]:
    """Yield the calls that load the model of a layer: `child` in `for name, child in model.named_children()`."""
    if node is None or depth == 0:
        return
    made = [each.atom for each in facts.evaluate(node, at) if isinstance(each.atom, Object)]
    loads = [atom.call for atom in made if atom.call is not None and atom.call.name in api_names.LOADERS]
    if loads:
        yield from loads
    elif isinstance(node, cst.Call):
        call = facts.call_of(node)
        if call is not None and call.name in api_names.LOADERS:
            yield call
            return
        inner = None if call is None else call.receiver or (call.positional[0] if call.positional else None)
        yield from _loads_of(inner, at, facts, depth - 1)
    elif isinstance(node, cst.Subscript):
        yield from _loads_of(node.value, at, facts, depth - 1)
    elif name := dotted(node):
        bindings = facts.bindings(name, at)
        if not bindings and isinstance(node, cst.Attribute):
            yield from _loads_of(node.value, at, facts, depth - 1)
        for binding in bindings[:4]:
            if binding.kind != "param":
                yield from _loads_of(binding.value, binding, facts.of(binding), depth - 1)
                continue
            for caller in facts.callers(binding.scope)[:4]:
                given = facts.argument_for(caller, binding)
                yield from _loads_of(given, caller, facts.of(caller), depth - 1)
