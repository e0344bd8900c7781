"""Optimizers that the project defines, what their `step` reads, and copies of weights that an optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events.event import is_scaler
from mpguard.lint.facts.program import api_names
from mpguard.lint.facts.program.lattice import Atom, Class, Object
from mpguard.lint.facts.program.mappings import is_changed
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import Flag, PathCondition, implies
from mpguard.lint.source.strip_comments import stripped
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.events import Event
    from mpguard.lint.facts.domain.view import DomainView
    from mpguard.lint.facts.syntax.records import Call, Record, Scope

#: Base classes of libraries whose own `step` applies nothing.
_WITHOUT_STEP = frozenset({"torch.optim.Optimizer", "torch.optim.optimizer.Optimizer", "object"})
_GRADIENT = lazy_pattern(r"\.grad\b|[\"']grad[\"']")
_IS_INSTANCE = lazy_pattern(r"isinstance\(([\w.]+), ?([\w.]+)\)")


def steps_through_scaler(step: Event, scaler: cst.CSTNode | None, facts: DomainView) -> bool:
    """True for an optimizer that holds the scaler, and whose `step` steps through it.

    Its class in the project shows that. If the class is not known, the scaler is its attribute
    (`optimizer.scaler.scale(loss)`), or was given to what created it: `build_optimizer(model, scaler)`.
    """
    atoms = [each.atom for each in facts.evaluate(step.subject, step.call)]
    classes = [atom.cls for atom in atoms if isinstance(atom, Object) and atom.cls is not None]
    if classes:
        return any(_steps_scaler(cls, facts.of(cls)) for cls in classes)
    if step.key and dotted(scaler).startswith(f"{step.key}."):
        return True
    # What sets the scaler too, as `model, optimizer, scaler = load(path, scaler)`, hands out both.
    apart = {bound.statement for bound in facts.bindings(dotted(scaler), step.call)}
    calls = [atom.call for atom in atoms if isinstance(atom, Object)]
    calls += [facts.call_of(bound.value) for bound in facts.bindings(step.key, step.call, step.guard)]
    return any(
        _takes_scaler(call, facts.of(call)) for call in calls if call is not None and call.statement not in apart
    )


def _takes_scaler(call: Call, facts: DomainView) -> bool:
    return any(is_scaler(facts, given, call) for given in (*call.positional, *call.keywords.values()))


def _steps_scaler(cls: Scope, facts: DomainView) -> bool:
    """True if a method of a class, or of a base class in the project, steps through a scaler."""
    inside = set(cls.descendants())
    return any(event.scope in inside for event in facts.events("scaler_step")) or any(
        isinstance(base, Class) and _steps_scaler(base.scope, facts.of(base.scope)) for base in facts.classes.bases(cls)
    )


def ignores_gradients(step: Event, facts: DomainView) -> bool:
    """True for a step of an optimizer of the project that reads no `.grad`, as one that updates running averages."""
    atoms: list[Atom] = [each.atom for each in facts.evaluate(step.subject, step.call)]
    for flag in step.guard.flags():
        tested = _IS_INSTANCE.fullmatch(flag)
        if tested is not None and tested[1] == step.key and implies(step.guard, PathCondition([Flag(flag)])):
            atoms = [each.atom for each in facts.resolve(tested[2], step.scope, step.order)]
    return bool(atoms) and all(_reads_no_gradients(atom, facts) for atom in atoms)


def _reads_no_gradients(atom: Atom, facts: DomainView) -> bool:
    if isinstance(atom, Object):
        return atom.cls is not None and _is_without(atom.cls, facts.of(atom.cls))
    return isinstance(atom, Class) and _is_without(atom.scope, facts.of(atom.scope))


def _is_without(cls: Scope, facts: DomainView) -> bool:
    """True if neither a class nor its base classes in the project read gradients, or step another optimizer."""
    facts.need_all()
    bases = facts.classes.bases(cls)
    return (
        _GRADIENT.search(stripped(cls.chunk.text)) is None
        and not any(call.name == "step" for scope in cls.descendants() for call in scope.calls)
        and all(
            _is_without(base.scope, facts.of(base.scope))
            if isinstance(base, Class)
            else base in _WITHOUT_STEP or (base != "" and cls.method("step") is not None)
            for base in bases
        )
    )


#: Methods and functions whose result has the dtype of the tensor; those that copy it; those that take a tensor.
_KEEPS = frozenset({"detach", "detach_", "requires_grad_", "clone", "deepcopy", "Parameter", "cuda", "cpu"})
_COPIES = frozenset({"clone", "deepcopy"})
_TAKE_TENSOR = lazy_pattern(r"^torch\.clone$|deepcopy$|Parameter$")


def copied_weights(facts: DomainView, dtype: Dtype) -> Iterator[tuple[Call, Call, Event]]:
    """Yield copies of weights in their own 16-bit dtype, the optimizers that update them, and the model's cast."""
    for call in (each for scope in facts.scopes for each in scope.calls):
        given = call.argument(0, "params")
        if given is not None and facts.called_path(call).startswith("torch.optim."):
            copies, source = _Weights(dtype).of(given, call, facts)
            if copies and source is not None and facts.of(copies[0]) is facts:
                yield copies[0], call, source


class _Weights:
    """Follows a list of weights to the model, which has one 16-bit dtype."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype
        self.seen: set[cst.CSTNode] = set()

    def of(self, node: cst.CSTNode | None, at: Record, facts: DomainView) -> tuple[list[Call], Event | None]:
        """Return the copies on the way to a model, in its dtype, and what gives it that; None for any other list."""
        if node is None or node in self.seen:
            return [], None
        self.seen.add(node)
        if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            return self._of_each(node.elt, node.for_in, at, facts)
        if isinstance(node, (cst.List, cst.Dict)) and node.elements:  # the first group, and its parameters
            return self.of(node.elements[0].value, at, facts)
        call = facts.call_of(node)
        if call is not None and call.name in ("parameters", "named_parameters") and call.receiver is not None:
            made = facts.bindings(dotted(call.receiver), call) if dotted(call.receiver) else []
            copies = (facts.call_of(each.value) for each in made)
            return [each for each in copies if each is not None and each.name == "deepcopy"], self._cast(
                call.receiver, call, facts
            )
        if call is not None:
            returns = [each for function in facts.functions(call) for each in function.scope.returns]
            if len(returns) == 1:
                return self.of(returns[0].value, returns[0], facts.of(returns[0]))
            return self.of(call.argument(0) if call.path == "list" else None, call, facts)
        bindings = facts.bindings(dotted(node), at) if dotted(node) else []
        bound = bindings[0] if len(bindings) == 1 and not is_changed(dotted(node), facts) else None
        if bound is not None and bound.kind == "assign":
            for added in facts.calls.get("append", ()) if isinstance(bound.value, cst.List) else ():
                loop = added.loops[-1] if dotted(added.receiver) == dotted(node) and added.loops else None
                if isinstance(loop, cst.For):
                    return self._of_each(added.argument(0), loop, added, facts)
            return self.of(bound.value, bound, facts)
        if bound is None or bound.kind != "param" or facts.escapes(bound.scope):
            return [], None
        calls = facts.callers(bound.scope)
        found = [self.of(facts.argument_for(each, bound), each, facts.of(each)) for each in calls]
        return found[0] if found and all(source for _, source in found) else ([], None)

    def _of_each(
        self, node: cst.CSTNode | None, loop: cst.For | cst.CompFor, at: Record, facts: DomainView
    ) -> tuple[list[Call], Event | None]:
        """Follow a list that has, for each item of another, the item or its copy in the same dtype."""
        copies: list[Call] = []
        while not isinstance(node, cst.Name):
            call = facts.call_of(node)
            if call is not None and call.name in _KEEPS:
                copies += [call] if call.name in _COPIES else []
                node = call.argument(0) if _TAKE_TENSOR.search(call.path) else call.receiver
            elif isinstance(node, cst.Attribute) and node.attr.value == "data":
                node = node.value
            else:
                return [], None
        last = loop.target.elements[-1].value if isinstance(loop.target, cst.Tuple) else loop.target
        more, source = self.of(loop.iter, at, facts) if dotted(last) == node.value else ([], None)
        return [*copies, *more], source

    def _cast(self, model: cst.BaseExpression, at: Call, facts: DomainView) -> Event | None:
        """Return the load or cast that gives a model its dtype, if each that is known gives it this one."""
        records = set(facts.flow.backward(model, at))
        homes = dict.fromkeys((facts, *map(facts.of, records)))
        events = [event for each in homes for event in (*each.events("load"), *each.events("cast")) if event.dtypes]
        others = [each.call for each in events if {dtype for _, dtype in each.dtypes} != {self.dtype}]
        others += [call for each in homes for name in api_names.UPCASTS for call in each.calls.get(name, ())]
        scopes = {at.scope, *(each.scope for each in records)}
        if any(each in records or (each.is_statement and each.scope in scopes) for each in others):
            return None
        found = [
            each
            for each in events
            if each.call in records
            or (
                each.call.is_statement
                and each.key == dotted(model)
                and each.scope is at.scope
                and each.order < at.order
            )
        ]
        return found[-1] if found and not facts.is_inference(at) else None
