"""`ScalerUse`: the optimizers that a GradScaler steps between its updates, and schedules that ignore skipped steps."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any

from mpguard.runtime.proof.observe import innermost, name_of
from mpguard.runtime.proof.remarks import Remark

#: Updates of a scaler that are checked, and of how many a pattern consists.
LOOKED_AT, PATTERN = 16, 4

#: Steps in a row whose learning rates are compared, and before which a scaler has loaded one state.
IN_A_ROW = 3

#: Updates in a row with one given value after which a scale is static, and changes of its tensor by something else.
REPEATED = 2


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step of an optimizer. number: among those that were applied or skipped. rate: its learning rate."""

    number: int
    rate: float
    skipped: bool


@dataclasses.dataclass
class _Scale:
    """The scale of a GradScaler. version: of its tensor, after the last update. given: the values that the last updates
    in a row were given; changed: how often in a row something else has changed it before the next step.
    """

    tensor: int = 0
    version: int = -1
    given: list[float] = dataclasses.field(default_factory=list)
    changed: int = 0


class ScalerUse:
    """The optimizers that were stepped before each of the first updates of a GradScaler, their last steps, and what
    sets its scale.
    """

    def __init__(self) -> None:
        self._scales: weakref.WeakKeyDictionary[Any, _Scale] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Any, list[list[Any]]] = weakref.WeakKeyDictionary()
        #: The scalers that were updated, or that have loaded a state.
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Scale and growth tracker of the states that a scaler has loaded before its last steps, and since; None where
        #: it has loaded none.
        self._loaded: weakref.WeakKeyDictionary[Any, list[tuple[float, int] | None]] = weakref.WeakKeyDictionary()
        #: The last scaler that has stepped an optimizer, and how many in a row were new at their only step.
        self._new: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], int]] = weakref.WeakKeyDictionary()
        self._rates: weakref.WeakKeyDictionary[Any, list[_Step]] = weakref.WeakKeyDictionary()

    def stepped(self, scaler: Any, optimizer: Any) -> None:
        """Record that a scaler has stepped an optimizer, or skipped its step."""
        rounds = self._steps.setdefault(scaler, [[]])
        own = innermost(optimizer)
        if len(rounds) <= LOOKED_AT:
            rounds[-1].append(weakref.ref(own))
        last, count = self._new.get(own, (None, 0))
        another = last is None or last() is not scaler
        self._new[own] = weakref.ref(scaler), 0 if scaler in self._followed else count + another

    def updated(self, scaler: Any) -> Remark | None:
        """Record an update. Return a remark if two optimizers take turns, with an update after each of them."""
        self._followed.add(scaler)
        rounds = self._steps.setdefault(scaler, [[]])
        if len(rounds) > LOOKED_AT:
            return None
        rounds.append([])
        last = rounds[-1 - PATTERN : -1]
        first, second = (last[0], last[1]) if len(last) == PATTERN else ([], [])
        if len(first) != 1 or len(second) != 1 or first == second or last[2:] != [first, second]:
            return None
        names = " and ".join(name_of(each()) for each in (*first, *second))
        return Remark(
            "updates",
            f"`scaler.update()` is called after the step of each of two optimizers ({names}): the loss scale, which "
            "both share, changes twice as often as it is set to, and between their backward passes. Call it once per "
            "iteration, after both were stepped, or give each its own GradScaler",
            "MPG206",
        )

    def scale_updated(self, scaler: Any, given: Any) -> None:
        """Record an update of the scale. given: the new value that the script has passed; None if it has not."""
        known = self._scales.setdefault(scaler, _Scale())
        value = float(given) if isinstance(given, (int, float)) or getattr(given, "is_cpu", False) else None
        known.given = [] if value is None else [*known.given[-IN_A_ROW:], value]
        own = scaler._scale
        known.tensor, known.version = id(own), own._version if own is not None else -1

    def scale_loaded(self, scaler: Any) -> None:
        """Forget the scale before a checkpoint was loaded."""
        self._scales.pop(scaler, None)
        self._followed.add(scaler)
        self._loaded.setdefault(scaler, [None])[-1] = scaler._init_scale, scaler._init_growth_tracker

    def scale_found(self, scaler: Any) -> None:
        """Compare the tensor of the scale at a step with what the last update has left. Reads no value of it."""
        if loaded := self._loaded.get(scaler):
            loaded[:] = [*loaded[-IN_A_ROW:], None]
        known, own = self._scales.get(scaler), getattr(scaler, "_scale", None)
        if known is None or own is None or known.version < 0:
            return
        version = max(known.version, getattr(scaler, "_last_change", -1))
        known.changed = known.changed + 1 if (id(own), own._version) != (known.tensor, version) else 0
        known.tensor, known.version = id(own), own._version

    def set_by_script(self, scaler: Any, optimizer: Any) -> str:
        """Return how the script sets the scale of a step itself, always to one value; empty if it does not."""
        if scaler not in self._followed and self._new.get(optimizer, (None, 0))[1] >= REPEATED:
            return "a new GradScaler in each step"
        *loaded, _ = self._loaded.get(scaler, [None])
        if len(loaded) == IN_A_ROW and loaded[0] is not None and len(set(loaded)) == 1:
            return "load_state_dict() of one state before each step"
        known = self._scales.get(scaler, _Scale())
        if len(known.given) >= REPEATED and len(set(known.given)) == 1:
            return f"update({known.given[-1]:g}) after each step"
        return "its tensor is changed between update() and step()" if known.changed >= REPEATED else ""

    def rate_used(self, optimizer: Any, number: int, *, skipped: bool) -> Remark | None:
        """Record the learning rate of a step. Return a remark if a schedule has gone on after one that was skipped.

        A schedule of torch changes the rate after each of two steps in a row then; one that goes on once per epoch does
        not. Rates on a device are not read.
        """
        rate = optimizer.param_groups[0].get("lr")
        if not isinstance(rate, float) or not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            return None
        steps = self._rates[optimizer] = [*self._rates.get(optimizer, ()), _Step(number, rate, skipped)][-IN_A_ROW:]
        if len(steps) < IN_A_ROW or steps[0].number != number - IN_A_ROW + 1:
            return None
        if not any(step.skipped for step in steps[:-1]) or any(a.rate == b.rate for a, b in itertools.pairwise(steps)):
            return None
        return Remark(
            "schedule",
            f"the learning rate of {name_of(optimizer)} goes on after steps that the GradScaler has skipped: "
            f"{', '.join(f'{step.rate:.4g}' for step in steps)} at steps {steps[0].number} to {number}, of which "
            f"{sum(step.skipped for step in steps)} were skipped. The schedule runs ahead of the optimizer, and a "
            "warm-up is shorter: call `scheduler.step()` only where `scaler.get_scale()` has not decreased",
            "MPG216",
        )
