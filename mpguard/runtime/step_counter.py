"""`StepCounter`: the applied and skipped steps of each optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpguard.runtime.containment import contained
from mpguard.runtime.meter import Meter
from mpguard.runtime.plan import Plan
from mpguard.runtime.progress import Progress
from mpguard.runtime.proof.models import places_of
from mpguard.runtime.proof.observe import innermost
from mpguard.runtime.proof.remarks import overflows
from mpguard.runtime.proof.verdict import (
    Failure,
    FailureKind,
)
from mpguard.runtime.run_state import RunState
from mpguard.runtime.scaler_use import ScalerUse

if TYPE_CHECKING:
    import torch

#: Steps skipped in a row before the run counts as not proven: a dynamic scale from 2**32 with
#: hysteresis 2 needs at most 64 to come down to 1.
SKIPPED_LIMIT = 128

#: Steps skipped in a row after which it is reported that the loss scale collapses.
SKIPPED_NOTICE = 32

#: Flags of a fused optimizer that are read together: reading one waits for the device.
UNREAD_LIMIT = 32


class StepCounter(RunState):
    """Counts steps, and reports or refuses a loss scale that does not settle."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        #: How GradScalers are used.
        self.scaler_use = ScalerUse()
        #: What measures the steps, in a run that `mpguard tune` has started.
        self.meter: Meter | None = None

    @property
    def skipped(self) -> int:
        """Steps of all optimizers that were skipped."""
        return sum(progress.skipped for progress in self.run)

    # -- steps ---------------------------------------------------------------------------

    def measure(self, optimizer: Any) -> None:
        """Record the end of a step, applied or skipped, if the run is measured. It may end this process."""
        if self.meter is not None:
            self.meter.step(innermost(optimizer))

    def _read_infinities(self, optimizer: torch.optim.Optimizer, progress: Progress) -> bool:
        """Return True if a step was applied. A fused optimizer is called for skipped steps too: it skips them itself.

        Its flag is on the device. Between checks, flags are collected and read together, without waiting at each step.
        """
        infinities: Any = getattr(optimizer, "found_inf", None)  # a GradScaler sets it while it calls the optimizer
        if infinities is None:
            return True
        steps = progress.applied + len(progress.unread) + 1
        due = not progress.proven or progress in self._under_check or steps + 1 >= (progress.next_check or 0)
        progress.unread.append(infinities)
        if infinities.device.type != "cpu" and not due and len(progress.unread) < UNREAD_LIMIT:
            return False
        return not self.count_unread(progress, but_last=True)

    def count_unread(self, progress: Progress, *, but_last: bool) -> bool:
        """Count the steps whose flags were not read, and return the last flag.

        but_last: do not count the last step if it was applied.
        """
        import torch

        flags = [bool(flag) for flag in torch.stack([each.detach().reshape(()) for each in progress.unread]).tolist()]
        progress.unread.clear()
        for number, skipped in enumerate(flags, 1):
            if skipped or not (but_last and number == len(flags)):
                progress.applied += not skipped
                self._count_skipped(progress, skipped)
        return flags[-1]

    def _remark_on_skipped(self, optimizer: Any) -> None:
        """Report numbers that became infinite in a step that was recorded and skipped: they may be the reason."""
        found = self.recorder.account.overflows
        if found:
            with contained("the remarks about a skipped step"):
                places = places_of(self.models_of(optimizer))
                self.reporter.report_remarks(overflows(found, None, places))

    def _follow_schedule(self, optimizer: Any, progress: Progress, *, skipped: bool) -> None:
        """Report a schedule that goes on after a step that was skipped: the learning rate has changed at each step."""
        with contained("the remarks about a schedule"):
            number = progress.applied + progress.skipped
            remark = self.scaler_use.rate_used(optimizer, number, skipped=skipped)
            if remark is not None:
                self.reporter.report_remarks([remark])

    def _count_skipped(self, progress: Progress, skipped: bool) -> None:
        progress.skipped += skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if skipped else 0
        if progress.skipped_in_a_row == SKIPPED_NOTICE and progress.proven:
            self.reporter.report_collapse(progress, SKIPPED_LIMIT)
        if skipped:
            self.recorder.gradients.loss_sum = None  # a scaled loss may overflow in a step that is skipped
            self._check_skipped(progress)

    def _check_skipped(self, progress: Progress) -> None:
        """Raise `NotInForce` if too many steps in a row were skipped: of one optimizer, or before any was proven."""
        in_a_row = progress.skipped_in_a_row
        if in_a_row <= SKIPPED_LIMIT or progress.failed or self.open_inspections:
            return
        reason = (
            f"{in_a_row} optimizer steps in a row were skipped; the loss scale does not settle. Check "
            "the loss and the gradients for inf and NaN"
        )
        if not any(other.proven for other in self.run):
            self.conclude_unproven(reason)
        elif progress.proven:
            failure = Failure(FailureKind.WRONG, reason, "scaler")
            self.fail_alone(progress, failure, before=f"step {progress.applied + progress.skipped}: ")
