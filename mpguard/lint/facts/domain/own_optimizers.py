"""Optimizers that the project defines, and what their `step` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events.event import is_scaler
from mpguard.lint.facts.program.lattice import Atom, Class, Object
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import Flag, PathCondition, implies
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.events import Event
    from mpguard.lint.facts.domain.view import DomainView
    from mpguard.lint.facts.syntax.records import Call, Scope

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
