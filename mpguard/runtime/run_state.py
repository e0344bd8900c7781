"""`RunState`: what a process knows about its run, how a step is inspected, and what follows from a failure.

`Guard` schedules on it when a step is inspected; `script_guard` does for scripts without an optimizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from mpguard.policy.allow import BF16
from mpguard.runtime import plan_exchange
from mpguard.runtime.inspection import Inspection
from mpguard.runtime.messages import not_in_force
from mpguard.runtime.plan import Plan
from mpguard.runtime.progress import Budget, Progress
from mpguard.runtime.proof import consensus, trees
from mpguard.runtime.proof.checks.common import is_unsynchronized
from mpguard.runtime.proof.inferred import Inferred
from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.observe import Observed, name_of, observe, updated_by
from mpguard.runtime.proof.recorder import Recorder
from mpguard.runtime.proof.report import Proof
from mpguard.runtime.proof.verdict import (
    NOT_IN_FORCE,
    NOT_PROVEN,
    Failure,
    FailureKind,
    Refusal,
)
from mpguard.runtime.ranks import rank
from mpguard.runtime.reporter import Reporter

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Numbers of the guards of this process: ranks do not read what was agreed on under an earlier one.
guard_numbers = itertools.count()


#: What to do about ranks that never step an optimizer.
NEVER_STEP = (
    "If some ranks only act, generate or serve, or compute gradients that another rank applies (a parameter server), "
    "declare these: mpguard_allow: [{idle_ranks: 1-3}]. What they compute in is not proven then"
)


@dataclasses.dataclass
class OptimizerState:
    """What is known about one optimizer. Held by a weak reference to it."""

    #: Its steps; None before the first one.
    progress: Progress | None = None
    #: Its outermost models: finding them takes longer than the rest of an inspection.
    models: list[weakref.ref[nn.Module]] = dataclasses.field(default_factory=list)
    #: What the graphs of backward passes imply that reach its parameters, before its first step.
    implied: Inferred | None = None
    #: The number of these graphs.
    passes_read: int = 0
    #: The inspection of its first step, while other ranks have not applied a step of theirs yet.
    pending: Inspection | None = None
    #: True if it was inspected once or more.
    observed: bool = False
    #: Why it is not stepped again, after the run was refused and another one has begun.
    refused: Refusal | None = None


class RunState:
    """The run of this process, as far as it is known, and how it fails."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        #: Prints and writes the proof.
        self.reporter = Reporter()
        #: The current proof; None until there is one.
        self.proof: Proof | None = None
        #: The proof before a checkpoint was loaded.
        self.previous_proof: Proof | None = None
        #: Why `NotInForce` was raised; None if it was not.
        self.refusal: Refusal | None = None
        #: The first refusal that no call of `activate` has withdrawn: the status of the process is 1.
        self.refused: Refusal | None = None
        #: True if the other ranks do not have the failure, as far as this one knows.
        self.alone = False
        #: The optimizers that exist.
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        #: What records the step that runs now.
        self.recorder = Recorder(optimizers=self.optimizers)
        #: What the run goes without, with the reason: wishes of the recipe; for all optimizers, and for single ones.
        self.left_out: dict[str, str] = {}
        self.left_out_for: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
        #: One entry per optimizer that has stepped, in that order.
        self.run: list[Progress] = []
        #: The time that inspections take, and may take.
        self.budget = Budget()
        #: Inspections that other ranks have not published yet, also of optimizers that no longer exist.
        self.open_inspections: list[Inspection] = []
        self._states: weakref.WeakKeyDictionary[Any, OptimizerState] = weakref.WeakKeyDictionary()
        #: Optimizers that have not stepped yet.
        self._unstepped: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The steps that are inspected when they are applied.
        self._under_check: set[Progress] = set()
        #: True if optimizer steps are observed.
        self._listening = False
        #: The number of the recorder.
        self._recording = 0
        #: True if the recorder was started between the steps of all optimizers.
        self._whole = True
        #: How often the proof was repeated, and how many agreements there were since, by kind: their names.
        self._repetition = 0
        self._rounds: Counter[str] = Counter()
        self._number = next(guard_numbers)

    @property
    def listening(self) -> bool:
        """True if optimizer steps are observed."""
        return self._listening

    @property
    def waiting(self) -> bool:
        """True while a step is recorded: an optimizer is still to be proven, or the step is checked."""
        return self._listening and self.recorder.active

    def state_of(self, optimizer: Any) -> OptimizerState:
        """Return what is known about an optimizer."""
        state = self._states.get(optimizer)
        if state is None:
            state = self._states[optimizer] = OptimizerState()
        return state

    def known_progress(self, optimizer: Any) -> Progress | None:
        """Return the steps of an optimizer; None if it has not stepped."""
        state = self._states.get(optimizer)
        return state.progress if state is not None else None

    def progress_of(self, optimizer: Any) -> Progress:
        """Return the steps of an optimizer, which has stepped or is about to."""
        state = self.state_of(optimizer)
        if state.progress is None:
            state.progress = Progress(name_of(optimizer))
            self.run.append(state.progress)
            self._unstepped.discard(optimizer)
        return state.progress

    def record(self, *, whole: bool, in_step: bool = False, again: bool = False) -> None:
        """Start a recorder for the next step, unless one is recording.

        whole: True between the steps of all optimizers. After the step of one, the others may step for gradients that
        were not recorded. in_step: True while an optimizer's `step` runs, see `StepAccount.restart`. again: True for a
        later check of an optimizer that was proven.
        """
        if not self.recorder.active:
            recorder = Recorder(self.recorder, self.optimizers)
            recorder.start(self.plan.policy, in_step=in_step, again=again)
            self._recording, self._whole = self._recording + 1, whole
            self.recorder = recorder  # last: other threads may step now
        elif not again:
            self.recorder.account.trusts_graphs(False)

    def next_round(self, optimizer: Any, seen: Observed) -> str:
        """Return the name of the next agreement: the same on all ranks, also after one of them loads a checkpoint.

        Models that a rank trains for itself are counted separately.
        """
        kind = "alone" if is_unsynchronized(seen) else "together"
        state = self.state_of(optimizer)
        if state.observed:
            kind = f"again/{self._repetition}/{kind}"
        state.observed = True
        self._rounds[kind] += 1
        return f"{self._number}/{kind}/{self._rounds[kind]}"

    def models_of(self, optimizer: Any) -> list[nn.Module]:
        """Return the outermost models of an optimizer, and keep them for the next check."""
        found = self._known_models(optimizer) or models_of(updated_by(optimizer))
        self.state_of(optimizer).models = [weakref.ref(model) for model in found]
        return found

    def _known_models(self, optimizer: Any) -> list[nn.Module]:
        """Return the models that were found; none if one of them no longer exists."""
        known = self.state_of(optimizer).models
        models = [found for ref in known if (found := ref()) is not None]
        return models if len(models) == len(known) else []

    def _observe(self, optimizer: Any, progress: Progress, model: nn.Module | None) -> Observed:
        """Observe the step of an optimizer that was just applied, and measure what that costs."""
        began = time.monotonic() - self.recorder.account.take_seconds()
        models = [model] if model is not None else self._known_models(optimizer)
        step = progress.applied + progress.skipped
        with trees.walking_once():
            seen = observe(
                self.recorder, models, optimizer, policy=self.plan.policy, kept=self.plan.allowed(BF16), step=step
            )
        self.state_of(optimizer).models = [weakref.ref(found) for found in models]
        self.reporter.report_remarks(seen.remarks)
        seen.skipped = progress.skipped
        seen.left_out = {**self.left_out, **self.left_out_for.get(optimizer, {})}
        self.recorder.account.take_seconds()  # they are a part of what was measured here
        progress.cost = time.monotonic() - began
        return seen

    def inspect(self, optimizer: Any, progress: Progress, model: nn.Module | None = None) -> Inspection:
        """Inspect a later step; without facts if mpguard's own code fails, which must not end a run."""
        try:
            return Inspection(self.plan, self._observe(optimizer, progress, model), progress)
        except Exception as error:
            self.reporter.report_error(progress, error)
            return Inspection(self.plan, None, progress)

    def conclude(self, inspection: Inspection, everywhere: list[Failure] | None, progress: Progress) -> None:
        """Report the proof, and fail if there are failures. everywhere: of all ranks; None if ranks are missing."""
        if everywhere is not None:
            plan_exchange.check_settled(self.plan, self.refuse)
        if everywhere is None:
            self.alone = True
            why = f"no result from {inspection.missing()}: no step of this optimizer was applied there"
            everywhere = inspection.without(why, NEVER_STEP)
        proof = inspection.conclude(everywhere)
        first = self.proof is None
        if first or not proof.in_force:
            self.proof = self.reporter.of_run(proof)
        progress.failed = bool(proof.failures)
        if proof.in_force:
            progress.checks.append(inspection.applied)
            progress.unobserved.update(dict.fromkeys(proof.unobserved))
        progress.not_finite += proof.in_force and (inspection.loss_not_finite or bool(inspection.ranks_not_finite))
        self.reporter.report_not_finite(progress, inspection.applied, inspection.ranks_not_finite)
        progress.without_result += not proof.failures and not proof.in_force
        self.reporter.report_proof(
            proof, first=first, repeated=self.previous_proof is not None,
            optimizers=sum(each.proven for each in self.run), run=self.run,
        )  # fmt: skip
        if proof.failures:
            self.fail(Refusal(proof.failures))

    def conclude_check(
        self, inspection: Inspection, progress: Progress, failures: list[Failure], *, agreed: bool
    ) -> None:
        """Record the result at a later step, and fail if something is wrong. agreed: True if all ranks have it."""
        proof = inspection.conclude(failures)
        wrong = tuple(failure for failure in proof.failures if failure.kind is FailureKind.WRONG)
        if not wrong:
            in_force = inspection.seen is not None and proof.in_force
            if in_force:
                progress.checks.append(progress.applied)
                progress.unobserved.update(dict.fromkeys(proof.unobserved))
            progress.not_finite += in_force and inspection.loss_not_finite
            progress.without_result += not in_force
            self.reporter.report_check(self.proof, self.run, proof.failures)
            return
        last = f"; step {progress.checks[-1]} was in force" if progress.checks else ""
        self.proof = dataclasses.replace(proof, verdict=NOT_IN_FORCE, failures=wrong)
        self.reporter.report_proof(self.proof, first=True, repeated=False, optimizers=1, run=self.run)
        before = f"step {progress.applied + progress.skipped}: "
        if agreed:
            progress.failed = True
            self.fail(Refusal(wrong, before, last))
        else:
            self.fail_alone(progress, *wrong, before=before, after=last)

    def conclude_unproven(self, reason: str) -> None:
        """Report a failure that is found before there is anything to compare, and fail."""
        failure = Failure(FailureKind.UNPROVEN, reason)
        proof = Proof(NOT_PROVEN, self.plan, failures=(failure,))
        self.proof = self.proof or self.reporter.of_run(proof)
        self.recorder.stop()
        self.reporter.report_proof(proof, first=True, repeated=False, optimizers=0, run=self.run)
        self.fail(Refusal((failure,)))

    def refuse(self, failure: Failure, *, alone: bool) -> None:
        """Report a failure that is known without a step, and fail. Raises `NotInForce`.

        alone: True if rank 0 may not know it.
        """
        self.recorder.stop()
        self.proof = Proof(NOT_IN_FORCE, self.plan, failures=(failure,))
        self.reporter.report_proof(self.proof, first=True, repeated=False, optimizers=0, run=self.run)
        self.alone = alone
        self.fail(Refusal((failure,)))

    def refuse_cast(self, advice: str, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        progress = self.progress_of(optimizer)
        if progress.cast is not None and not progress.failed and self.refusal is None:
            text = f"weights: {progress.cast}, and training continued with them"
            self.fail_alone(progress, Failure(FailureKind.WRONG, text, "weights", advice=advice))

    def fail_alone(self, progress: Progress, *failures: Failure, before: str = "", after: str = "") -> None:
        """Fail on this rank: the others may not have the failure, or not at this step. Raises `NotInForce`.

        before, after: text around the failures, see `Refusal`.
        """
        progress.failed = self.alone = True
        self._under_check.discard(progress)
        refusal = Refusal(failures, before, after)
        if self.proof is not None:
            self.proof = dataclasses.replace(self.proof, verdict=NOT_IN_FORCE, failures=tuple(refusal.published()))
            self.reporter.update_proof(self.proof, self.run)
        self.fail(refusal)

    def fail(self, refusal: Refusal) -> None:
        """Raise `NotInForce`; with `enforce` warn or off, report the failures and return."""
        if self.plan.enforce == "error":
            self.refusal, self.refused = refusal, self.refused or refusal
            self.recorder.stop()  # a profiler that still runs crashes the process at its end
            consensus.publish_end(refusal.published())
            raise not_in_force(refusal)
        self.reporter.warn_failure(refusal, self.plan.enforce, alone=self.alone)
        if self.alone and rank():
            consensus.publish_warning(refusal.published())

    def leave_out(self, field: str, reason: str, optimizer: Any = None) -> None:
        """Report, now and in the proof, that the run goes without what its recipe would like.

        optimizer: the only one that the reason concerns.
        """
        found = self.left_out if optimizer is None else self.left_out_for.setdefault(optimizer, {})
        found[field] = reason
        at_start = self.plan.left_out_at_start() if self.plan.announced else {}
        if at_start.get(field) != reason:
            self.reporter.print_once(f"mpguard: {field} is off here: {reason}")

    @property
    def without_optimizer(self) -> bool:
        """True if nothing is proven yet, and there is nothing whose step could be."""
        return self.proof is None and not (self.optimizers or self.recorder.engines or self.run)
