"""The autocast that is active at a place: that of a region, of the callers, or Accelerate's around a prepared model."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour import accelerate_precision, lightning
from mpguard.lint.facts.program.dtypes import AnyDtype
from mpguard.lint.facts.program.lattice import Class, Object
from mpguard.lint.facts.syntax.nodes import constant
from mpguard.lint.facts.syntax.path_condition import ALWAYS, All, PathCondition, compatible, negated
from mpguard.lint.facts.syntax.records import Call, Record, Scope
from mpguard.lint.source.libcst_internals import Frames
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: Depth of the search through callers and enclosing modules, and the number of callers per function.
_MAX_DEPTH = 6
_MAX_CALLERS = 12
#: Words of code that may run a function under autocast.
_MENTIONS_AUTOCAST = lazy_pattern(
    r"(?i:autocast|\bamp\b|accelerat|deepspeed|lightning|fabric|mixed.?precision)|import [^\n]*Trainer|\(\w*Trainer\)"
)


@dataclasses.dataclass(frozen=True, eq=False)
class AutocastState:
    """An autocast that may be active: `dtype` is "off" without autocast, or None if it is unknown."""

    guard: PathCondition
    dtype: AnyDtype | Literal["off"] | None
    device: str | None = None
    origin: Record | None = None


_UNKNOWN = (AutocastState(ALWAYS, None),)


class AutocastStates:
    """The autocast states of one file."""

    def __init__(self, facts: BehaviourView) -> None:
        self.facts = facts
        self._around: dict[Scope, tuple[AutocastState, ...]] = {}

    def at(self, record: Record) -> tuple[AutocastState, ...]:
        """Return the autocasts that may be active at a record.

        These are those of its function, otherwise those of its callers.
        """
        with Frames():
            return self._at(record, _MAX_DEPTH)

    def _at(self, record: Record, depth: int) -> tuple[AutocastState, ...]:
        found: list[AutocastState] = []
        without = ALWAYS  # that no region so far is entered
        for region in reversed(self.facts.regions(record)):
            if region.kind in ("no_grad", "fp8_autocast"):
                continue
            if region.kind != "autocast":
                return (*found, *_UNKNOWN)
            if not region.guard.possible:
                return (*found, AutocastState(ALWAYS, "off"))
            for guard, dtype in region.dtypes:
                both = region.guard.joined(guard)
                if compatible(both, record.guard):
                    found.append(AutocastState(both, dtype, region.device, region.call))
            entered = region.guard - record.guard
            if not entered:
                return tuple(found)
            without = without.given(negated(All(tuple(entered))))
        outer = self._outer(record.scope, depth)
        return (*found, *(dataclasses.replace(each, guard=each.guard.joined(without)) for each in outer))

    def _outer(self, scope: Scope, depth: int) -> tuple[AutocastState, ...]:
        """Return the autocasts around the callers of a function; "off" for the top level of a script."""
        if scope.kind != "function":
            return (AutocastState(ALWAYS, "off"),) if scope.kind == "module" else _UNKNOWN
        if scope in self._around:
            return self._around[scope]
        self._around[scope] = _UNKNOWN
        if by_trainer := self._by_trainer(scope):
            self._around[scope] = by_trainer
            return by_trainer
        callers = self.facts.callers(scope) if depth else []
        found: list[AutocastState] = []
        for call in callers[:_MAX_CALLERS]:
            for state in self._prepared(call) or self.facts.of(call).part(AutocastStates)._at(call, depth - 1):
                guard = state.guard.joined(call.guard)
                if guard.possible:
                    found.append(dataclasses.replace(state, guard=guard))
        model = scope.owner is not None and self.facts.classes.class_kind(scope.owner) == "model"
        hosts = self._hosts(scope) if model and not callers and depth else []
        for host in hosts:
            found += self._outer(host, depth - 1)
        backward = any(call.name == "backward" for call in scope.calls)  # a backward pass is never run under autocast
        if not model and (
            (backward and all(each.dtype is None for each in found)) or (not callers and self._mentions_no_autocast)
        ):
            found = [AutocastState(ALWAYS, "off")]
        elif not (callers or hosts) or len(callers) > _MAX_CALLERS or self.facts.escapes(scope):
            found.append(AutocastState(ALWAYS, None))
        if depth == _MAX_DEPTH:
            self._around[scope] = tuple(found)
        else:
            del self._around[scope]
        return tuple(found)

    def _hosts(self, scope: Scope) -> list[Scope]:
        """Return the `forward` methods that run that of a layer.

        All instances of the layer must be created by modules of the file:
        `self.layers = ModuleList([Block() for _ in range(12)])`. Empty if one of them may enter an autocast.
        """
        owner, found = scope.owner, []
        if owner is None or scope.name != "forward" or scope.decorators:
            return []
        for call in self.facts.calls.get(owner.name, ()):
            atoms = [each.atom for each in self.facts.evaluate(call.func, call)]
            if not any(isinstance(atom, Class) and atom.scope is owner for atom in atoms):
                continue
            host = call.scope.owner.method("forward") if call.scope.owner is not None else None
            if host is None or host is scope or host.withs or host.decorators:
                return []
            found.append(host)
        return list(dict.fromkeys(found))

    @functools.cached_property
    def _mentions_no_autocast(self) -> bool:
        """True if nothing in the file mentions autocast.

        A script is analysed on its own; a module's `forward` depends on its callers only.
        """
        return not _MENTIONS_AUTOCAST.search(self.facts.source.text)

    def _by_trainer(self, scope: Scope) -> tuple[AutocastState, ...]:
        """Return the autocast in which Lightning's Trainers run the `training_step` of a module; empty for others."""
        if scope.name != "training_step" or scope.owner is None or not lightning.is_module(scope.owner, self.facts):
            return ()
        found: list[AutocastState] = []
        for call, values in lightning.trainers_of(scope.owner, self.facts.of(scope)):
            on_cpu = constant(call.keywords.get("accelerator")) == ("cpu",)  # Lightning takes BF16 there
            for value in sorted(values):
                dtype = None if on_cpu else lightning.AUTOCAST.get(value)
                found.append(AutocastState(ALWAYS, dtype, "cuda", call))
        return tuple(found)

    def _prepared(self, call: Call) -> tuple[AutocastState, ...]:
        """Return the autocast that Accelerate applies to the `forward` of a model that it prepared."""
        if not any(isinstance(e.atom, Object) and e.atom.prepared for e in self.facts.evaluate(call.func, call)):
            return ()
        modes: dict[str | None, Dtype | Literal["off"]] = {"fp16": Dtype.FP16, "bf16": Dtype.BF16, "no": "off"}
        dtype = modes.get(accelerate_precision.precision(self.facts))
        return (AutocastState(ALWAYS, dtype, "cuda", call),)
