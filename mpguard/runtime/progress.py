"""`Progress`: the steps of an optimizer over the whole run, and when the next one is looked at.

After its first proof an optimizer is looked at again at its applied steps 2, 4, 8, ..., the same on all ranks, and
after a model was switched to evaluation, which each rank decides for itself. `Budget` limits what the looks cost.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

#: Looks may take this share of the run's time, after `FREE_SECONDS` that they may take in every run.
SHARE, FREE_SECONDS = 0.01, 0.5

#: For tests and benchmarks: each step is looked at, whatever that costs.
EVERY_STEP = False


class Budget:
    """The time that looks take, and may take. spent: seconds so far, without the first proof.

    Waiting for other ranks does not count: they would be waited for at the next reduction anyway.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.spent = 0.0

    def allows(self, cost: float, later: float = 0.0) -> bool:
        """Return True if a look that takes `cost` seconds may start in `later` seconds."""
        elapsed = time.monotonic() - self.began + later
        return self.spent + cost <= FREE_SECONDS + SHARE * elapsed


@dataclasses.dataclass(eq=False)
class Progress:
    """What one optimizer has done. Holds no tensor, no model and no optimizer: it may outlive them.

    name: its class. number: its position among the optimizers that all ranks have proven together. applied, skipped:
    steps. skipped_in_a_row: since the last applied step. recording: the recorder that its next step is recorded by, if
    it has not been proven. unrecorded: True if it has stepped while nothing was recorded, and was not proven since.
    proven: True after its first proof. failed: True if it is not in force and the run continues; then nothing more is
    looked at. agrees: True if its looks are agreed on with the other ranks. looks: applied steps at which it was found
    in force. without_result: looks that observed too little. next_look: the applied step of the next look that all
    ranks take. cost: seconds that the last observation took. switches: how many switches to evaluation the last look
    has followed. cast: where weights were cast, if they were. unread: flags of a fused optimizer on a device, see
    `Guard`. empty: steps without gradients in a row that were to be looked at.
    """

    name: str
    number: int | None = None
    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    recording: int = 0
    unrecorded: bool = False
    proven: bool = False
    failed: bool = False
    agrees: bool = False
    looks: list[int] = dataclasses.field(default_factory=list)
    without_result: int = 0
    next_look: int | None = None
    cost: float = 0.0
    switches: int = 0
    cast: str | None = None
    unread: list[Any] = dataclasses.field(default_factory=list)
    empty: int = 0
    _proven_at: tuple[float, int] = (0.0, 0)

    def prove(self, agrees: bool) -> None:
        """Record a first proof, or one after a checkpoint was loaded."""
        self.proven, self.unrecorded, self.agrees = True, False, agrees
        self._proven_at = time.monotonic(), self.applied
        self.next_look = self._earliest_look()

    def propose(self, budget: Budget) -> int:
        """Return the step of the next look: the first power of two that the budget allows."""
        began, first = self._proven_at
        look = self._earliest_look()
        if self.applied > first and not EVERY_STEP:
            step = (time.monotonic() - began) / (self.applied - first)
            while not budget.allows(self.cost, (look - self.applied) * step) and look < 2**40:
                look *= 2
        return look

    def leave_out_look(self) -> None:
        """Set the next look to the first power of two: all ranks do the same without an agreement."""
        self.next_look = self._earliest_look()

    def _earliest_look(self) -> int:
        return self.applied + 1 if EVERY_STEP else 1 << self.applied.bit_length()

    def facts(self) -> dict[str, Any]:
        """Return what the proof file has about the run."""
        return {
            "optimizer": self.name,
            "steps": self.applied,
            "skipped": self.skipped,
            "looks": self.looks,
            "looks_without_result": self.without_result,
        }


def summary(run: Iterable[Progress]) -> str | None:
    """Return the line about the whole run: `in force at steps 1-4096 (13 looks), 2 steps skipped`.

    The steps are those of the optimizer with the most. None if no optimizer was proven, or one is not in force.
    """
    run = list(run)
    if any(progress.failed or progress.unrecorded for progress in run):
        return None
    run = [progress for progress in run if progress.looks]
    if not run:
        return None
    longest = max(run, key=lambda progress: progress.applied)
    first, last, looks = longest.looks[0], longest.looks[-1], len(longest.looks)
    steps = f"steps {first}-{last}" if last > first else f"step {first}"
    steps += f" of {longest.applied}" if longest.applied > last else ""
    skipped = sum(progress.skipped for progress in run)
    notes = [f"{looks} look{'s' if looks > 1 else ''}"]
    notes += [f"{longest.without_result} without a result"] if longest.without_result else []
    others = f"; {len(run) - 1} other optimizer{'s' if len(run) > 2 else ''} too" if len(run) > 1 else ""
    line = f"in force at {steps} ({', '.join(notes)}){others}"
    return f"{line}, {skipped} step{'s' if skipped > 1 else ''} skipped" if skipped else line
