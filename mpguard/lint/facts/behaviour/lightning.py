"""Lightning's `Trainer` and `Fabric`, by all their package names, and the precision that they are created with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from mpguard.lint.facts.program.lattice import Constant
from mpguard.lint.facts.program.option_values import option_defaults
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.view import aliases
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView
    from mpguard.lint.facts.syntax.records import Call, Scope

_ROOTS = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "lightning_pytorch"})
#: Values of `precision` under which Lightning enters autocast, with the old spellings; of them those in FP16.
MIXED = frozenset({"16", "bf16", "16-mixed", "bf16-mixed"})
FP16_MIXED = frozenset({"16", "16-mixed"})
#: Values of `precision` of a Trainer -> the dtype of the autocast around `training_step`; others are unknown.
AUTOCAST: dict[str, Dtype | Literal["off"]] = {
    **dict.fromkeys(FP16_MIXED, Dtype.FP16),
    **dict.fromkeys(MIXED - FP16_MIXED, Dtype.BF16),
    **dict.fromkeys(("32", "32-true", "64", "64-true"), "off"),
}


def created(facts: BehaviourView, *names: str) -> Iterator[Call]:
    """Yield the calls that create one of these objects of Lightning, not of another framework."""
    for name in (*names, *(other for each in names for other in aliases(facts, each))):
        for call in facts.calls.get(name, ()):
            for _, path in facts.paths(call):
                if path.split(".", 1)[0] in _ROOTS and path.rsplit(".", 1)[-1] in names:
                    yield call
                    break


def precision(facts: BehaviourView, call: Call, defaults: bool = False) -> set[str]:
    """Return the possible values of `precision=` as text: 16 is "16", an unknown value is "".

    defaults: an unknown option or parameter has its default, if it has a single one.
    """
    given = call.keywords.get("precision")
    if given is None:
        return set()
    found = [each.atom.value if isinstance(each.atom, Constant) else "" for each in facts.evaluate(given, call)]
    known = option_defaults(dotted(given).rpartition(".")[2], facts) if defaults and "" in found else set()
    if len(known) == 1 and (default := known.pop()) is not None:
        found = [each if each != "" else default[0] for each in found]
    return {str(each) for each in found}


def is_module(cls: Scope, facts: BehaviourView) -> bool:
    """True for a class that is, or may be, a LightningModule."""
    return facts.class_kind(cls) == "framework" or any(
        base.endswith("LightningModule") for base in (*cls.base_names, *facts.ancestry(cls))
    )


def optimizes_manually(cls: Scope, facts: BehaviourView) -> bool:
    """True if a module sets `automatic_optimization = False`, or has a property of this name that returns False."""
    own = cls.method("automatic_optimization")
    values = [binding.value for binding in facts.attributes(cls).get("automatic_optimization", ())]
    values += [each.value for each in own.returns] if own is not None else []
    return any(constant(value) == (False,) for value in values)


def trainers_of(cls: Scope, facts: BehaviourView) -> list[tuple[Call, set[str]]]:
    """Return the Trainers with a precision in the file of a module, or else in those that use the module."""
    for near in ([facts], facts.users(cls.name) or []):
        for user in near:
            user.need_all()
        found = [(user, call) for user in near for call in created(user, "Trainer")]
        if given := [(call, precision(user, call)) for user, call in found if "precision" in call.keywords]:
            return given
    return []
