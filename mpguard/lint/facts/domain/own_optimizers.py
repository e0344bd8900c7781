"""Optimizers that the project defines, and what their `step` reads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpguard.lint.facts.syntax.path_condition import Flag, PathCondition, implies
from mpguard.lint.facts.values.lattice import Atom, Class, Object
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.lint.facts.events import Event
    from mpguard.lint.facts.file import Facts
    from mpguard.lint.facts.syntax.records import Scope

#: Base classes of libraries whose own `step` applies nothing.
_WITHOUT_STEP = frozenset({"torch.optim.Optimizer", "torch.optim.optimizer.Optimizer", "object"})
_GRADIENT = re.compile(r"\.grad\b|[\"']grad[\"']")
_IS_INSTANCE = re.compile(r"isinstance\(([\w.]+), ?([\w.]+)\)")


def ignores_gradients(step: Event, facts: Facts) -> bool:
    """True for a step of an optimizer of the project that reads no `.grad`, as one that updates running averages."""
    atoms: list[Atom] = [each.atom for each in facts.evaluate(step.subject, step.call)]
    for flag in step.guard.flags():
        tested = _IS_INSTANCE.fullmatch(flag)
        if tested is not None and tested[1] == step.key and implies(step.guard, PathCondition([Flag(flag)])):
            atoms = [each.atom for each in facts.resolve(tested[2], step.scope, step.order)]
    return bool(atoms) and all(_reads_no_gradients(atom) for atom in atoms)


def _reads_no_gradients(atom: Atom) -> bool:
    if isinstance(atom, Object):
        return atom.cls is not None and atom.facts is not None and _is_without(atom.cls, atom.facts)
    return isinstance(atom, Class) and _is_without(atom.scope, atom.facts)


def _is_without(cls: Scope, facts: Facts) -> bool:
    """True if neither a class nor its base classes in the project read gradients, or step another optimizer."""
    facts.need_all()
    bases = facts.graph.bases(cls)
    return (
        _GRADIENT.search(stripped(cls.chunk.text)) is None
        and not any(call.name == "step" for scope in cls.descendants() for call in scope.calls)
        and all(
            _is_without(base.scope, base.facts)
            if isinstance(base, Class)
            else base in _WITHOUT_STEP or (base != "" and cls.method("step") is not None)
            for base in bases
        )
    )
