"""`LaterChecks`: which later steps of an optimizer are checked, and what happens at one.

A check is observed, compared and agreed on as the first proof is. Which step is next, all ranks decide together, see
`progress`. Each rank checks a step for itself after a switch to evaluation, and after a step in other autocast regions
than those of the checked ones: a warm-up in FP32, or each tenth step in FP16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpguard.runtime.plan import Plan
from mpguard.runtime.progress import Progress
from mpguard.runtime.proof import consensus, program_threads, trees
from mpguard.runtime.proof.collectives import number_of_calls
from mpguard.runtime.proof.observe import updated_by
from mpguard.runtime.ranks import world_size
from mpguard.runtime.step_counter import StepCounter

if TYPE_CHECKING:
    from torch import nn

#: Steps of the other optimizers for which the step of an optimizer is waited for that was created, or stepped, late.
NEWCOMER_STEPS = 64

#: Steps that are checked, at most, until there is one with the autocast regions of a step that was not checked.
AWAITED_STEPS = 16

#: Seconds that checks may take in every run while there are such steps.
AWAITED_SECONDS = 2.0

#: Steps without gradients in a row, at checks, before it is reported and the next ones are not recorded.
EMPTY_STEPS = 8


class LaterChecks(StepCounter):
    """Opens, makes and closes the checks of later steps."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        #: Models that were switched to evaluation.
        self.switches = 0
        #: Steps of other optimizers for which the first step of one is still waited for.
        self._newcomer_steps = 0
        #: The autocast regions since the last step.
        self.regions: set[tuple[str, str, bool]] = set()

    def _await(self, progress: Progress, *, in_step: bool = False) -> None:
        """Record the next step of an optimizer that has not been proven, for a few steps of the others."""
        with program_threads.reading:
            self._newcomer_steps = NEWCOMER_STEPS
            self.record(whole=False, in_step=in_step)
            progress.recording = self._recording

    def _open_check(self, optimizer: Any, progress: Progress, *, in_step: bool = False) -> None:
        """Record the next step if it is to be checked."""
        due = progress.applied + 1 == progress.next_check
        if not due and progress.switches != self.switches:
            due = self.budget.allows(progress.cost, free=AWAITED_SECONDS if progress.awaited_steps else None)
        if due:
            progress.switches = self.switches
            with program_threads.reading:  # no other thread stops to record in between
                self._under_check.add(progress)
                self.record(whole=False, in_step=in_step, again=True)
                self.recorder.begin_gap(optimizer, updated_by(optimizer))

    def _compare_regions(self, progress: Progress, *, checked: bool) -> None:
        """Have the following steps checked after one in autocast regions that no checked step had.

        checked: True if the step that was applied was checked.
        """
        regions = frozenset(self.regions)
        self.regions.clear()
        if checked:
            progress.checked_regions.add(regions)
            if progress.awaited_regions == regions:
                progress.awaited_steps = 0
        elif regions not in progress.checked_regions and not progress.awaited_steps:
            progress.awaited_regions, progress.awaited_steps = regions, AWAITED_STEPS
            progress.checked_regions.add(regions)  # waited for once
        if progress.awaited_steps:
            progress.awaited_steps -= 1
            progress.switches = -1  # the next step is checked, if the budget allows it

    def _close_round(self) -> None:
        """Stop to record, unless a step is checked, or the first step of a new optimizer is still expected."""
        self._newcomer_steps = max(0, self._newcomer_steps - 1)
        with program_threads.reading:
            if self.recorder.active and not self._under_check and not self._newcomer_steps:
                self.recorder.stop()

    def _check_step(self, optimizer: Any, progress: Progress, model: nn.Module | None) -> None:
        """Check a step that was just applied: observe, compare, agree with the other ranks. Raises `NotInForce`."""
        agreed = progress.applied == progress.next_check
        if model is None and not self.recorder.record_step(optimizer):
            self._check_again(progress, agreed=agreed)
            return  # there was no gradient to apply
        progress.empty = 0
        with self.recorder.ignoring_collectives():
            inspection = self.inspect(optimizer, progress, model)
            self._under_check.discard(progress)  # until here no other thread stops to record
            failures, unknown = inspection.failures, self.recorder.account.unknown
            self.budget.spent += progress.cost
            if agreed and progress.agrees and _stops_early(optimizer, self.models_of(optimizer)):
                progress.agrees = False
                self.reporter.report_uneven(progress)
            if agreed and progress.agrees:
                proposal = progress.propose(self.budget)
                proposal = progress.applied + 1 if unknown else proposal
                report = consensus.Report(
                    failures, inspection.fingerprint, proposal, moment=number_of_calls(), again=unknown,
                    not_finite=inspection.loss_not_finite,
                )  # fmt: skip
                point = f"check/{progress.number}/{progress.applied}"
                agreement = consensus.agree(point, report, consensus.CHECK_TIMEOUT)
                failures = agreement.failures
                progress.not_finite += bool(agreement.not_finite) and not inspection.loss_not_finite
                self.reporter.report_not_finite(progress, progress.applied, agreement.not_finite)
                progress.next_check = agreement.next_check
                if agreement.missing:
                    progress.agrees = False
                    self.reporter.report_missing(progress, agreement.missing)
        if agreed and not progress.agrees:
            progress.next_check = progress.applied + 1 if unknown else progress.propose(self.budget)
        elif unknown and not agreed:
            progress.switches = -1  # it is inspected again by this rank
        self._close_round()
        self.conclude_check(inspection, progress, failures, agreed=agreed and progress.agrees)

    def _check_again(self, progress: Progress, *, agreed: bool) -> None:
        """Check the next step in place of one without gradients; after several of these, a later one."""
        progress.empty += 1
        if progress.empty < EMPTY_STEPS:
            progress.next_check = progress.applied + 1 if agreed else progress.next_check
            return
        if progress.empty == EMPTY_STEPS:
            self.reporter.report_empty(progress)
        self._under_check.discard(progress)
        progress.leave_out_check()
        self._close_round()

    def switch_to_evaluation(self) -> None:
        """Check the step after the next: a model was switched to evaluation."""
        self.switches += 1


def _stops_early(optimizer: Any, models: Iterable[nn.Module]) -> bool:
    """True in torch's `Join`: a rank with fewer batches stops earlier, and its steps are not those of other ranks."""
    if world_size()[0] == 1:
        return False
    every = itertools.chain((optimizer,), (module for root in models for module in trees.modules(root)))
    configs = (getattr(each, "_join_config", None) for each in every)
    return any(each is not None and each.enable and not each.throw_on_early_termination for each in configs)
