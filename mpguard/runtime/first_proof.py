"""`FirstProof`: how an optimizer is proven at its first applied step, and again after a checkpoint was loaded.

If other ranks have not stepped it yet, training continues, and the ranks agree at a later step. An optimizer whose step
was not recorded is observed from the graphs of its backward passes, which count if no recorded step follows.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from mpguard.policy.allow import BF16
from mpguard.runtime.checkpoints import Loaded
from mpguard.runtime.containment import contained
from mpguard.runtime.inspection import Inspection
from mpguard.runtime.later_checks import LaterChecks
from mpguard.runtime.plan import Plan
from mpguard.runtime.progress import Progress
from mpguard.runtime.proof import consensus, missing_gradients, program_threads
from mpguard.runtime.proof.checks.common import is_unsynchronized
from mpguard.runtime.proof.inferred import Inferred, products_behind
from mpguard.runtime.proof.observe import observe, updated_by
from mpguard.runtime.proof.recorder import Recorder

if TYPE_CHECKING:
    from torch import nn

#: The loss scaler of DeepSpeed's engines, as its facts name it: checkpoints of an engine have its state.
ENGINE_SCALER = "DeepSpeed's loss scaler"

#: Graphs of backward passes that are read, while nothing is recorded, for an optimizer that has not stepped yet.
UNRECORDED_PASSES = 64

#: Numbers of the optimizers that all ranks have proven together, in that order.
_numbers = itertools.count()


class FirstProof(LaterChecks):
    """Proves optimizers at their first applied step."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        #: What was loaded from checkpoints.
        self.loaded = Loaded()
        #: What was observed at a step that was not recorded, from graphs.
        self.unrecorded: dict[Progress, Inspection] = {}
        #: Why a step had no gradients; empty if none was without.
        self.without_gradients = ""

    def _prove_first(self, optimizer: Any, progress: Progress, model: nn.Module | None) -> None:
        """Prove an optimizer that has not been proven, or not since a checkpoint was loaded."""
        state = self.state_of(optimizer)
        if state.pending is not None and self.proof is not None and progress.applied & (progress.applied - 1):
            self._close_round()
            return  # it was observed; other ranks may never step it: they are asked at its steps 2, 4, 8, ...
        with program_threads.reading:
            recorded = self.recorder.active and (self._whole or progress.recording == self._recording)
            if recorded:
                self._under_check.add(progress)  # no other thread stops to record
        try:
            self._prove_step(optimizer, progress, model, recorded=recorded)
        finally:
            self._under_check.discard(progress)
        if progress.failed:
            self._close_round()

    def _prove_step(self, optimizer: Any, progress: Progress, model: nn.Module | None, *, recorded: bool) -> None:
        state = self.state_of(optimizer)
        if not recorded and state.pending is None:
            progress.unrecorded = True
            self._observe_unrecorded(optimizer, progress)
            self._await(progress, in_step=True)
            return
        if recorded and model is None and not self.recorder.record_step(optimizer):
            progress.applied -= 1  # there was no gradient to apply
            if not self.without_gradients:
                with contained("the search for gradients"):
                    self.without_gradients = missing_gradients.why(optimizer, self.recorder.account.leaves())
            return
        with self.recorder.ignoring_collectives():
            pending, wait = state.pending, 0.0
            if pending is None:
                pending = self._publish(optimizer, progress, model)
                wait = consensus.REPEATED_WAIT if self.previous_proof else consensus.AGREEMENT_WAIT
            assert pending.seen is not None
            unsynchronized = is_unsynchronized(pending.seen)
            if unsynchronized:  # nobody waits for this rank in a reduction: it need not wait for them either
                wait = 0.0 if self.proof is not None else min(wait, consensus.ALONE_WAIT)
            everywhere = pending.agree(wait)
            if everywhere is None and (unsynchronized or not pending.failures):
                # A rank may skip this step, or train a small model for itself while others wait for it in a collective.
                return
            state.pending = None
            self.open_inspections.remove(pending)
            self._newcomer_steps = 0
            # Without a store ranks agree by a collective, in which one that stops earlier would be waited for.
            with_others = pending.seen.world_size > 1 and not unsynchronized and pending.has_store
            progress.prove(agrees=with_others and everywhere is not None and not pending.late)
            if progress.agrees and progress.number is None:
                progress.number = next(_numbers)
            self.conclude(pending, everywhere, progress)

    def backward_unrecorded(self, outputs: Any) -> None:
        """Read the graph of a backward pass that was not recorded, if it reaches an optimizer that never stepped."""
        if not self._unstepped:
            return
        for optimizer in list(self._unstepped):
            if program_threads.is_used_elsewhere(optimizer):
                continue
            state = self.state_of(optimizer)
            parameters = updated_by(optimizer)
            reached = any(own.grad is not None for own in parameters[:: max(1, len(parameters) // 8)])
            if reached and state.passes_read < UNRECORDED_PASSES:
                state.passes_read += 1
                implied = products_behind(outputs)
                others = {id(own) for other in self.optimizers for own in updated_by(other)}
                # FSDP2 has copies of the parameters: leaves of no optimizer.
                if implied.leaves & {id(own) for own in parameters} or not implied.leaves & others:
                    state.implied = state.implied or Inferred()
                    state.implied.add(implied)

    def _observe_unrecorded(self, optimizer: Any, progress: Progress) -> None:
        """Observe a step of which only graphs were read: it counts if no step follows that is recorded."""
        state = self.state_of(optimizer)
        implied, state.implied = state.implied, None
        if implied is None:
            return
        recorder = Recorder(self.recorder)
        recorder.account.imply(implied)
        recorder.record_step(optimizer)
        seen = observe(
            recorder,
            [],
            optimizer,
            policy=self.plan.policy,
            kept=self.plan.allowed(BF16),
            step=progress.applied + progress.skipped,
        )
        inspection = Inspection(self.plan, seen, progress)
        self._rounds["unrecorded"] += 1
        name = f"{self._number}/unrecorded/{self._repetition}/{self._rounds['unrecorded']}"
        inspection.publish(name, self.recorder.backwards)
        self.unrecorded[progress] = inspection

    def _publish(self, optimizer: Any, progress: Progress, model: nn.Module | None) -> Inspection:
        """Inspect the first applied step of an optimizer, and publish the failures of this rank."""
        seen = self._observe(optimizer, progress, model)
        inspection = Inspection(self.plan, seen, progress)
        self._report_loaded(optimizer)
        inspection.publish(self.next_round(optimizer, seen), self.recorder.backwards)
        self.state_of(optimizer).pending = inspection
        self.open_inspections.append(inspection)
        return inspection

    def _report_loaded(self, optimizer: Any) -> None:
        """Print what was loaded from a checkpoint, once."""
        scaler = self.recorder.scalers.get(id(optimizer))
        by_torch = scaler is not None and scaler["kind"] != ENGINE_SCALER
        for line in self.loaded.report(scaler if by_torch else None):
            self.reporter.print_once(line)
