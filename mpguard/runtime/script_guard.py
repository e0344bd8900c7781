"""`ScriptGuard`: programs without an optimizer of torch, which update their weights themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpguard.policy.allow import BF16
from mpguard.runtime import casts
from mpguard.runtime.inspection import Inspection
from mpguard.runtime.progress import Progress
from mpguard.runtime.proof import consensus
from mpguard.runtime.proof.models import existing_optimizers
from mpguard.runtime.proof.observe import observe, updated_by
from mpguard.runtime.proof.script_updates import ScriptSteps, ScriptUpdate
from mpguard.runtime.run_state import RunState

if TYPE_CHECKING:
    import torch


class ScriptGuard:
    """Proves the backward passes of a script that applies their gradients itself, and inspects later ones."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._steps = ScriptSteps()

    def begin_again(self) -> None:
        """Forget all passes."""
        self._steps = ScriptSteps()

    @property
    def update(self) -> ScriptUpdate:
        """What stands in the place of an optimizer."""
        return self._steps.update

    @property
    def passes(self) -> int:
        """The number of backward passes that were recorded."""
        return self._steps.passes

    @property
    def progress(self) -> Progress | None:
        """The passes of a script that updates its weights itself, once they are proven; None if there are none."""
        progress = self._state.known_progress(self.update)
        in_force = progress is not None and progress.proven and not progress.failed
        return progress if in_force and not self._state.optimizers else None

    def is_idle(self) -> bool:
        """True if passes were recorded, and no weight was updated."""
        return self._steps.is_idle()

    def forget(self) -> None:
        """Forget the values: a checkpoint was loaded, which is no update."""
        self._steps.forget()

    def release(self, numbers: set[int]) -> None:
        """Release the weak references to leaves. numbers: their ids."""
        self._steps.release(numbers)

    def backward_ended(self, leaves: list[torch.Tensor], *, accumulates: bool) -> None:
        """Observe a backward pass of a script without optimizers, which may update its weights itself.

        leaves: those whose gradients it has made; empty between inspections. accumulates: False if it has returned
        them.
        """
        state, steps = self._state, self._steps
        if not (accumulates or steps.applies_returned):
            return
        if self.progress is not None:
            self._inspect(self.progress, leaves)
            return
        if not (state.waiting and state.without_optimizer and leaves):
            return
        if not steps.passes:
            # Those that were created before mpguard was activated, and that the pass reached.
            reached = {id(leaf) for leaf in leaves}
            state.optimizers.update(
                each
                for each in existing_optimizers()
                if any(own.grad is not None or id(own) in reached for own in updated_by(each))
            )
            if state.optimizers:
                return
        steps.record_pass(leaves, accumulates=accumulates)
        if steps.due:
            with state.recorder.ignoring_collectives():
                state.recorder.record_step(steps.update)
                steps.seen[steps.kind] = observe(
                    state.recorder, [], steps.update, policy=state.plan.policy, kept=state.plan.allowed(BF16),
                    step=steps.passes,
                )  # fmt: skip
        if steps.due or not state.recorder.account.active:
            state.recorder.account.restart()
            state.recorder.account.resume()

    def _inspect(self, progress: Progress, leaves: list[torch.Tensor]) -> None:
        """Count a backward pass, and inspect passes 4, 8, 16, ...; each rank for itself."""
        state = self._state
        progress.applied += 1
        if leaves:
            self.update.replace(leaves)
        state.refuse_cast(casts.ADVICE, self.update, (), {})
        if state.recorder.active:
            with state.recorder.ignoring_collectives():
                state.recorder.record_step(self.update)
                inspection = state.inspect(self.update, progress)
            state.budget.spent += progress.cost
            last = self._steps.is_last_of_check()
            progress.next_check = progress.propose(state.budget) if last else progress.applied + 1
            state.recorder.stop()
            state.conclude_check(inspection, progress, inspection.failures, agreed=False)
        if progress.applied + 1 == progress.next_check:
            state.record(whole=False)

    def prove_if_repeated(self) -> None:
        """Prove the passes if all kinds were seen, and their gradients have been applied. Raises `NotInForce`."""
        if self._state.without_optimizer and self._steps.repeats and self._steps.is_proof_due():
            self._prove(consensus.AGREEMENT_WAIT)

    def prove_at_the_end(self) -> None:
        """Prove the passes at the end of the script, if their gradients have been applied. Raises `NotInForce`."""
        if self._state.without_optimizer and self._steps.is_proof_due():
            self._prove(consensus.FINAL_WAIT)

    def _prove(self, wait: float) -> None:
        """Prove what was observed, after the script itself has updated the weights."""
        state = self._state
        progress = state.progress_of(self.update)
        progress.applied = max(seen.step for seen in self._steps.seen.values())
        inspections = [Inspection(state.plan, seen, progress) for seen in self._steps.seen.values()]
        failures = list(dict.fromkeys(failure for each in inspections for failure in each.failures))
        inspection = next((each for each in inspections if each.failures), inspections[-1])
        inspection.failures = failures
        assert inspection.seen is not None
        with state.recorder.ignoring_collectives():
            inspection.publish(state.next_round(self.update, inspection.seen), state.recorder.backwards)
            everywhere = inspection.agree(wait)
        progress.prove(agrees=False)
        state.recorder.stop()
        state.conclude(inspection, everywhere, progress)
