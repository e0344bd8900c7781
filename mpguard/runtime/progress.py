"""`Progress`: the steps of an optimizer over the whole run, and when the next one is checked.

After its first proof an optimizer is checked again at its applied steps 2, 4, 8, 16, and then at one between each power
of two and the next, the same on all ranks, so that no period of steps is left out. After a model was switched to
evaluation, and after a step with other autocast regions than those that were checked, each rank decides for itself.
`Budget` limits what the checks cost.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Iterable
from typing import Any

#: Checks may take this share of the run's time, after `FREE_SECONDS` that they may take in every run.
SHARE, FREE_SECONDS = 0.01, 0.5

#: The autocast regions of a step: device, dtype, and whether autocast is on.
AutocastRegions = frozenset[tuple[str, str, bool]]

#: The last check at a power of two.
LAST_POWER = 16

#: For tests and benchmarks: each step is checked, whatever that costs.
EVERY_STEP = False


class Budget:
    """The time that checks take, and may take. spent: seconds so far, without the first proof.

    Waiting for other ranks does not count: they would be waited for at the next reduction anyway.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.spent = 0.0

    def allows(self, cost: float, later: float = 0.0, *, free: float | None = None) -> bool:
        """Return True if a check that takes `cost` seconds may start in `later` seconds.

        free: seconds that checks may take in every run; `FREE_SECONDS` by default.
        """
        elapsed = time.monotonic() - self.began + later
        return self.spent + cost <= (FREE_SECONDS if free is None else free) + SHARE * elapsed


@dataclasses.dataclass(eq=False)
class Progress:
    """What one optimizer has done. Holds no tensor, no model and no optimizer: it may outlive them."""

    #: The class of the optimizer.
    name: str
    #: Its position among the optimizers that all ranks have proven together.
    number: int | None = None
    #: Steps that were applied.
    applied: int = 0
    #: Steps that were skipped.
    skipped: int = 0
    #: Of these, steps since the last applied one.
    skipped_in_a_row: int = 0
    #: The number of the recorder that records its next step, if it has not been proven.
    recording: int = 0
    #: True if it has stepped while nothing was recorded, and was not proven since.
    unrecorded: bool = False
    #: True after its first proof.
    proven: bool = False
    #: True if it is not in force and the run continues: its steps are not inspected any more.
    failed: bool = False
    #: True if its inspections are agreed on with the other ranks.
    agrees: bool = False
    #: The applied steps at which it was found in force.
    checks: list[int] = dataclasses.field(default_factory=list)
    #: How many of these had a loss that is not finite.
    not_finite: int = 0
    #: Inspections that observed too little.
    without_result: int = 0
    #: Rows that the plan asks for and that could not be observed where it was found in force.
    unobserved: dict[str, None] = dataclasses.field(default_factory=dict)
    #: The applied step that all ranks inspect next.
    next_check: int | None = None
    #: Seconds that the last observation took.
    cost: float = 0.0
    #: The last applied step whose inspection was put off because it would have cost too much; 0 if none was.
    put_off: int = 0
    #: The number of switches to evaluation before the last inspection.
    switches: int = 0
    #: The autocast regions of each kind of step that was checked, see `LaterChecks`.
    checked_regions: set[AutocastRegions] = dataclasses.field(default_factory=set)
    #: Those of a step that was not checked.
    awaited_regions: AutocastRegions | None = None
    #: For how many further steps one like it is waited for.
    awaited_steps: int = 0
    #: The dtype with fewer bits from which `weights`, or `states`, were loaded since the last applied step.
    loaded_from: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Where weights were cast; None if they were not.
    cast: str | None = None
    #: Flags of a fused optimizer that are still on its device, see `StepCounter`.
    unread: list[Any] = dataclasses.field(default_factory=list)
    #: Steps in a row that were to be inspected and had no gradients.
    empty: int = 0
    #: When it was proven (`time.monotonic`), and at which applied step.
    _proven_at: tuple[float, int] = (0.0, 0)

    def count_applied(self) -> None:
        """Count a step that was applied, and keep for the last line what was loaded before it from fewer bits."""
        self.applied += 1
        self.skipped_in_a_row = 0
        for what, dtype in self.loaded_from.items():
            self.unobserved[f"what {what} lost that were loaded from {dtype}"] = None
        self.loaded_from.clear()

    def prove(self, agrees: bool) -> None:
        """Record a first proof, or one after a checkpoint was loaded."""
        self.proven, self.unrecorded, self.agrees = True, False, agrees
        self._proven_at = time.monotonic(), self.applied
        self.next_check = self._earliest_check()

    def propose(self, budget: Budget) -> int:
        """Return the step of the next check: the first in the schedule that the budget allows."""
        began, first = self._proven_at
        candidate = earliest = self._earliest_check()
        if self.applied > first and not EVERY_STEP:
            step = (time.monotonic() - began) / (self.applied - first)
            while not budget.allows(self.cost, (candidate - self.applied) * step) and candidate < 2**40:
                candidate = scheduled_after(candidate)
        if candidate > earliest:
            self.put_off = earliest
        return candidate

    def leave_out_check(self) -> None:
        """Set the next check to the first in the schedule: all ranks do the same without an agreement."""
        self.next_check = self._earliest_check()

    def _earliest_check(self) -> int:
        return self.applied + 1 if EVERY_STEP else scheduled_after(self.applied)

    def facts(self) -> dict[str, Any]:
        """Return what the proof file has about the run."""
        return {
            "optimizer": self.name,
            "steps": self.applied,
            "skipped": self.skipped,
            "looks": self.checks,
            "looks_without_result": self.without_result,
            "looks_with_loss_not_finite": self.not_finite,
        }


def scheduled_after(step: int) -> int:
    """Return the first step after another in the schedule of checks: 1, 2, 4, 8, 16, then one of each octave.

    It is in the first quarter of the octave, at a pseudo-random place that is the same on all ranks: powers of two are
    no multiples of 3, 5 or 10, so that what recurs with such a period would never be checked.
    """
    octave = step.bit_length() - 1
    while (found := _scheduled(octave)) <= step:
        octave += 1
    return found


def _scheduled(octave: int) -> int:
    first = 1 << max(octave, 0)
    return first + zlib.crc32(f"check{octave}".encode()) % (first // 4) if first > LAST_POWER else first


def summary(run: Iterable[Progress]) -> str | None:
    """Return the line about the whole run: `in force at steps 1-4096 (13 checks), 2 steps skipped`.

    The steps are those of the optimizer with the most. None if no optimizer was proven, or one is not in force.
    """
    run = list(run)
    if any(progress.failed or progress.unrecorded for progress in run):
        return None
    run = [progress for progress in run if progress.checks]
    if not run:
        return None
    longest = max(run, key=lambda progress: progress.applied)
    first, last, checks = longest.checks[0], longest.checks[-1], len(longest.checks)
    steps = f"steps {first}-{last}" if last > first else f"step {first}"
    steps += f" of {longest.applied}" if longest.applied > last else ""
    skipped = sum(progress.skipped for progress in run)
    notes = [f"{checks} check{'s' if checks > 1 else ''}"]
    notes += [f"{longest.without_result} without a result"] if longest.without_result else []
    bad = sum(progress.not_finite for progress in run)
    notes += [f"{bad} with a loss that is not finite"] if bad else []
    costs = last < longest.put_off <= longest.applied
    put_off = f"; later ones put off: checks cost more than {100 * SHARE:g} %" if costs else ""
    others = f"; {len(run) - 1} other optimizer{'s' if len(run) > 2 else ''} too" if len(run) > 1 else ""
    unobserved = ", ".join(dict.fromkeys(name for progress in run for name in progress.unobserved))
    reserve = f", except for what could not be observed: {unobserved}" if unobserved else ""
    line = f"in force at {steps} ({', '.join(notes)}{put_off}){others}{reserve}"
    return f"{line}, {skipped} step{'s' if skipped > 1 else ''} skipped" if skipped else line
