"""When a process is proven, and what follows: one `Guard` per process.

After the first applied step of each optimizer, each rank observes and compares; the ranks then agree on the
failures, so that a mismatch on one rank is raised on all of them and no rank waits indefinitely. Skipped and
accumulated steps only delay the proof, within a limit. After a checkpoint has been loaded, the proof is repeated.

A look repeats that at later steps (see `progress`). Nothing is recorded between looks; there each step is counted, and
casts of the weights are reported (see `casts`). What is printed and written is in `reporter`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from mpguard.nn.compile import untraced
from mpguard.policy.allow import BF16, IDLE_RANKS, ranks_of
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import given
from mpguard.runtime import casts, plan_exchange
from mpguard.runtime.checkpoints import Loaded
from mpguard.runtime.containment import contained, contained_hook, has_failed
from mpguard.runtime.messages import not_in_force
from mpguard.runtime.meter import Meter
from mpguard.runtime.plan import Plan
from mpguard.runtime.progress import Budget, Progress
from mpguard.runtime.proof import account, checks, consensus
from mpguard.runtime.proof.checks.common import is_unsynchronized
from mpguard.runtime.proof.checks.optimizer import ROUNDED_WEIGHTS
from mpguard.runtime.proof.inferred import Inferred, products_behind
from mpguard.runtime.proof.models import existing_optimizers, models_of
from mpguard.runtime.proof.observe import Observed, innermost, name_of, observe, places_of, updated_by
from mpguard.runtime.proof.recorder import Recorder
from mpguard.runtime.proof.reductions import Fingerprint
from mpguard.runtime.proof.remarks import overflows
from mpguard.runtime.proof.report import Proof
from mpguard.runtime.proof.script_updates import ScriptSteps
from mpguard.runtime.proof.verdict import (
    IN_FORCE,
    NOT_IN_FORCE,
    NOT_PROVEN,
    Failure,
    FailureKind,
    Refusal,
    Row,
    names_of,
)
from mpguard.runtime.proof.witness import describe
from mpguard.runtime.ranks import declare_idle, is_forked_after_cuda, is_idle, rank, world_size
from mpguard.runtime.reporter import Reporter, unproven_at_exit
from mpguard.runtime.scaler_use import ScalerUse
from mpguard.targets.capabilities import left_out_at_start

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("mpguard")

#: The loss scaler of DeepSpeed's engines, as its facts name it: checkpoints of an engine have its state.
ENGINE_SCALER = "DeepSpeed's loss scaler"

#: Steps skipped in a row before the run counts as not proven: a dynamic scale from 2**32 with
#: hysteresis 2 needs at most 64 to come down to 1.
SKIPPED_LIMIT = 128

#: Steps skipped in a row after which it is reported that the loss scale collapses.
SKIPPED_NOTICE = 32

#: Flags of a fused optimizer that are read together: reading one waits for the device.
UNREAD_LIMIT = 32

#: Steps of the other optimizers for which the step of an optimizer is waited for that was created, or stepped, late.
NEWCOMER_STEPS = 64

#: Graphs of backward passes that are read, while nothing is recorded, for an optimizer that has not stepped yet.
UNRECORDED_PASSES = 64

#: Steps without gradients in a row, at looks, before it is reported and the next ones are not recorded.
EMPTY_STEPS = 8

#: Backward passes without an optimizer step before the run counts as not proven: far beyond any gradient accumulation.
BACKWARD_LIMIT = 10_000


class Guard:
    """Enforces a plan in this process: schedules the proof of each optimizer, and raises `NotInForce`. See `activate`.

    proof: the current proof; None until there is one. refusal: why `NotInForce` was raised; None if it was not.
    alone: True if the other ranks do not have that failure, as far as this one knows.
    step_calls: calls of `step` of any optimizer. switches: models that were switched to evaluation.
    engine_depth: nested calls of an engine that calls its optimizer itself. spawned: True if the script started this
    process, maybe to load data: then it is not reported, and not written to the proof file, that it does not train.
    converts_models, compiles_models: True if mpguard converts and compiles models when an optimizer is created; False
    where an `Accelerator` does. run: one entry per optimizer that has stepped, in that order. first_scale: where the
    last dynamic loss scale begins that was created. meter: what measures the steps, in a run that `mpguard tune` has
    started. scaler_use: how GradScalers are used.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        declare_idle(each for text in plan.allowed(IDLE_RANKS) for each in ranks_of(text))
        self.reporter = Reporter()
        self.proof: Proof | None = None
        self.refusal: Refusal | None = None
        #: The first refusal that no call of `activate` has withdrawn: the status of the process is 1.
        self.refused: Refusal | None = None
        #: The first failures that did not end the run, with `enforce` warn or off.
        self.warned: Refusal | None = None
        self._refused: weakref.WeakKeyDictionary[Any, Refusal] = weakref.WeakKeyDictionary()
        self.alone = False
        self.step_calls = 0
        self.switches = 0
        self.engine_depth = 0
        self.process = os.getpid()
        self.finished = False
        self.spawned = False
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.recorder = Recorder(optimizers=self.optimizers)
        self.converts_models = self.compiles_models = True
        self.loaded = Loaded()
        #: What the run goes without, with the reason: wishes of the recipe; for all optimizers, and for single ones.
        self.left_out: dict[str, str] = {}
        self.left_out_for: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
        self.run: list[Progress] = []
        self.scaler_use = ScalerUse()
        self.budget = Budget()
        self.first_scale: float | None = None
        self.meter: Meter | None = None
        self._script = ScriptSteps()
        self._optimizer_existed = False
        self._listening = False
        self._previous_proof: Proof | None = None  # the proof before a checkpoint was loaded
        self._progress: weakref.WeakKeyDictionary[Any, Progress] = weakref.WeakKeyDictionary()
        #: The outermost models of an optimizer: finding them takes longer than the rest of a look.
        self._models: weakref.WeakKeyDictionary[Any, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
        self._looking: set[Progress] = set()  # the step that runs now is looked at
        #: Optimizers that have not stepped yet: what the graphs of backward passes imply that reach their parameters.
        self._implied: weakref.WeakKeyDictionary[Any, Inferred] = weakref.WeakKeyDictionary()
        self._unstepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: What was observed at a step that was not recorded, from those graphs.
        self._unrecorded: dict[Progress, _Pending] = {}
        self._newcomer_steps = 0
        self._recording = 0  # the number of the recorder
        self._whole = True  # the recorder was started between the steps of all optimizers
        #: How often the proof was repeated, and how many agreements there were since, by kind: their names.
        self._repetition = 0
        self._rounds: Counter[str] = Counter()
        self._number = next(_guards)
        self._observed: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, once or more
        #: Optimizers that were observed, while other ranks have not applied a step of theirs yet.
        self._pending: weakref.WeakKeyDictionary[Any, _Pending] = weakref.WeakKeyDictionary()
        self._open: list[_Pending] = []  # the same, also of optimizers that no longer exist

    def listen(self) -> None:
        """Start to observe optimizer steps, and start the recorder. Needs torch."""
        if self.plan.enforce == "off" or self._listening:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        look = contained_hook(self._optimizer_stepped, "the look at an optimizer step")
        register_optimizer_step_post_hook(untraced(look))
        self.recorder.start(self.plan.policy)
        self._listening = True

    def begin_again(self) -> None:
        """Begin again in a process that was forked: it may train, or load data; nothing has happened here yet.

        After CUDA was initialized it loads data: there is no guard then, and what the parent has is kept as it is.
        """
        if is_forked_after_cuda():
            self.recorder.account.abandon()
            set_current(None)
            return
        self.process, self.spawned, self.finished = os.getpid(), True, False
        self.refused = self.warned = None
        self._refused.clear()
        self._forget()

    def withdraw_refusal(self) -> None:
        """Begin again after a refusal, as if nothing had happened: the script has called `activate` again.

        Does nothing without a refusal, and where there are other processes: they have ended, or wait for this one.
        """
        if self.refused is None or world_size() != (1, 1):
            return
        if self.refusal is not None:
            self._begin_after_refusal()
        self.refused, self.reporter.writes_file = None, True

    def _begin_after_refusal(self) -> None:
        """Prove what is created from now on; the optimizers of the run that was refused stay refused."""
        assert self.refusal is not None
        self._refused.update(dict.fromkeys([*self.optimizers, *self._progress], self.refusal))
        self.optimizers.clear()
        self.alone = self.reporter.writes_file = False
        self._number = next(_guards)
        self._forget()

    def _forget(self) -> None:
        """Forget what has happened, and record again if optimizer steps are observed."""
        self.proof = self.refusal = self._previous_proof = None
        self.step_calls = self.switches = self._newcomer_steps = self._repetition = 0
        self.run, self.budget, self._script = [], Budget(), ScriptSteps()
        for known in (
            self._progress, self._models, self._looking, self._rounds, self._observed, self._pending, self._implied,
            self._unstepped, self._unrecorded,
        ):  # fmt: skip
            known.clear()
        self._open.clear()
        if self._listening:
            self.recorder.stop()
            self._record(whole=True)

    # -- steps -------------------------------------------------------------------------------

    @property
    def listening(self) -> bool:
        """True if optimizer steps are observed."""
        return self._listening

    @property
    def waiting(self) -> bool:
        """True while a step is recorded: an optimizer is still to be proven, or the step is looked at."""
        return self._listening and self.recorder.active

    @property
    def skipped(self) -> int:
        """Steps of all optimizers that were skipped."""
        return sum(progress.skipped for progress in self.run)

    def _progress_of(self, optimizer: Any) -> Progress:
        progress = self._progress.get(optimizer)
        if progress is None:
            progress = self._progress[optimizer] = Progress(name_of(optimizer))
            self.run.append(progress)
            self._unstepped.pop(optimizer, None)
        return progress

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.step_calls += 1
        if optimizer in self._refused:
            raise not_in_force(self._refused[optimizer], again=True)
        if self.refusal is not None:
            raise not_in_force(self.refusal, again=True)  # at every step, for a script that catches it
        if self.plan.enforce == "off":
            return
        around = account.steps_around(optimizer)
        if any(each is optimizer for each in around):
            return  # it has called the step of its base class, and is not finished
        if account.updates_a_part(optimizer) or account.is_updated_by_others(optimizer):
            return  # the other one is proven
        if self.recorder.active:
            self.recorder.account.applied({id(parameter) for parameter in updated_by(optimizer)})
            self.recorder.share_scaler(optimizer, around)
        if self.engine_depth:  # the engine reports whether the step was applied
            if self.recorder.active:
                self.recorder.record_step(optimizer)
            return
        if not self.recorder.backwards and _only_initializes(optimizer):
            return
        progress = self._progress_of(optimizer)
        if self._read_infinities(optimizer, progress):
            self.step_applied(optimizer)
        self.measure(optimizer)

    def measure(self, optimizer: Any) -> None:
        """Record the end of a step, applied or skipped, if the run is measured. It may end this process."""
        if self.meter is not None:
            self.meter.step(innermost(optimizer))

    def _read_infinities(self, optimizer: torch.optim.Optimizer, progress: Progress) -> bool:
        """Return True if a step was applied. A fused optimizer is called for skipped steps too: it skips them itself.

        Its flag is on the device. Between looks, flags are collected and read together, without waiting at each step.
        """
        infinities: Any = getattr(optimizer, "found_inf", None)  # a GradScaler sets it while it calls the optimizer
        if infinities is None:
            return True
        steps = progress.applied + len(progress.unread) + 1
        due = not progress.proven or progress in self._looking or steps + 1 >= (progress.next_look or 0)
        progress.unread.append(infinities)
        if infinities.device.type != "cpu" and not due and len(progress.unread) < UNREAD_LIMIT:
            return False
        return not self._count_unread(progress, but_last=True)

    def _count_unread(self, progress: Progress, *, but_last: bool) -> bool:
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

    def step_begins(self, optimizer: Any) -> None:
        """Record the gradients with which a step begins, and compare weights whose memory has been replaced."""
        if self.waiting:
            self.recorder.begin_step(optimizer)
        progress = self._progress.get(optimizer)
        if progress is None or not progress.proven or progress.failed or progress.cast or self.refusal is not None:
            return
        if self.plan.policy.master_dtype is not Dtype.FP32:
            return
        for found in self.recorder.values.exchanged(optimizer):
            text = (
                f"optimizer: {progress.name}, weights fp32 {describe(found.match.to)} {found.when} (`parameter.data = "
                f"...` has replaced their values): {found.describe(f'a weight of {progress.name}')}; asked: weights "
                "and states fp32"
            )
            failure = Failure(FailureKind.WRONG, text, "optimizer", advice=ROUNDED_WEIGHTS)
            self._fail_alone(progress, failure, before=f"step {progress.applied + progress.skipped + 1}: ")
            return

    def step_skipped(self, optimizer: Any) -> None:
        """Count a step that was skipped because of an overflow. Raises `NotInForce` beyond the limit."""
        import torch

        optimizer = innermost(optimizer)
        if self._listening and isinstance(optimizer, torch.optim.Optimizer):
            progress = self._progress_of(optimizer)
            self._remark_on_skipped(optimizer)
            self._count_skipped(progress, True)
            self._follow_schedule(optimizer, progress, skipped=True)
            if self.proof is not None and not progress.proven and not self._whole:
                self._await(progress)

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
            self._check_skipped(progress)

    def step_applied(self, optimizer: Any, model: nn.Module | None = None) -> None:
        """Count an applied step; prove the optimizer at its first one, and look at a later one. Raises `NotInForce`.

        model: the engine that has called the optimizer, if one has.
        """
        if not self._listening:
            return
        optimizer = innermost(optimizer)
        progress = self._progress_of(optimizer)
        if is_idle() and self.refusal is None:
            self.alone = True
            self._conclude_unproven(f"allow: idle_ranks names rank {rank()}, and {progress.name} was stepped there")
        progress.applied += 1
        progress.skipped_in_a_row = 0
        if progress.skipped:
            self._follow_schedule(optimizer, progress, skipped=False)
        if not progress.proven:
            self._prove_first(optimizer, progress, model)
        elif progress in self._looking:
            self._look(optimizer, progress, model)
        else:
            self._close_round()
        if progress.proven and not progress.failed:
            self._open_look(optimizer, progress, in_step=True)

    def _prove_first(self, optimizer: Any, progress: Progress, model: nn.Module | None) -> None:
        """Prove an optimizer that has not been proven, or not since a checkpoint was loaded."""
        if optimizer in self._pending and self.proof is not None and progress.applied & (progress.applied - 1):
            self._close_round()
            return  # it was observed; other ranks may never step it: they are asked at its steps 2, 4, 8, ...
        recorded = self.recorder.active and (self._whole or progress.recording == self._recording)
        if not recorded and optimizer not in self._pending:
            progress.unrecorded = True
            self._observe_unrecorded(optimizer, progress)
            self._await(progress, in_step=True)
            return
        if recorded and model is None and not self.recorder.record_step(optimizer):
            progress.applied -= 1  # there was no gradient to apply
            return
        with self.recorder.ignoring_collectives():
            pending, wait = self._pending.get(optimizer), 0.0
            if pending is None:
                pending = self._publish(optimizer, progress, model)
                wait = consensus.REPEATED_WAIT if self._previous_proof else consensus.AGREEMENT_WAIT
            unsynchronized = is_unsynchronized(pending.seen)
            alone = unsynchronized and self.proof is not None
            everywhere = pending.agreement.result(min(wait, consensus.ALONE_WAIT) if alone else wait)
            if everywhere is None and (unsynchronized or not pending.agreement.failures):
                # A rank may skip this step, or train a small model for itself while others wait for it in a collective.
                return
            del self._pending[optimizer]
            self._open.remove(pending)
            self._newcomer_steps = 0
            # Without a store ranks agree by a collective, in which one that stops earlier would be waited for.
            with_others = pending.seen.world_size > 1 and not unsynchronized and pending.agreement.store is not None
            progress.prove(agrees=with_others and everywhere is not None and not pending.late)
            if progress.agrees and progress.number is None:
                progress.number = next(_numbers)
            self._conclude(pending, everywhere, progress)

    def backward_unrecorded(self, outputs: Any) -> None:
        """Read the graph of a backward pass that was not recorded, if it reaches an optimizer that never stepped."""
        if not self._unstepped:
            return
        for optimizer, read in list(self._unstepped.items()):
            parameters = updated_by(optimizer)
            reached = any(own.grad is not None for own in parameters[:: max(1, len(parameters) // 8)])
            if reached and read < UNRECORDED_PASSES:
                self._unstepped[optimizer] = read + 1
                implied = products_behind(outputs)
                others = {id(own) for other in self.optimizers for own in updated_by(other)}
                # FSDP2 has copies of the parameters: leaves of no optimizer.
                if implied.leaves & {id(own) for own in parameters} or not implied.leaves & others:
                    self._implied.setdefault(optimizer, Inferred()).add(implied)

    def _observe_unrecorded(self, optimizer: Any, progress: Progress) -> None:
        """Observe a step of which only graphs were read: it counts if no step follows that is recorded."""
        implied = self._implied.pop(optimizer, None)
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
        rows = checks.compare(seen, self.plan)
        failures = checks.failures(rows, self.plan, seen)
        self._rounds["unrecorded"] += 1
        name = f"{self._number}/unrecorded/{self._repetition}/{self._rounds['unrecorded']}"
        agreement = consensus.Round(name, failures, _fingerprint(seen), self.recorder.backwards)
        self._unrecorded[progress] = _Pending(rows, seen, agreement, progress)

    def _publish(self, optimizer: Any, progress: Progress, model: nn.Module | None) -> _Pending:
        """Observe the first applied step of an optimizer, and publish the failures of this rank."""
        seen = self._observe(optimizer, progress, model)
        rows = checks.compare(seen, self.plan)
        self._report_loaded(optimizer)
        failures = checks.failures(rows, self.plan, seen)
        moment = self.recorder.backwards
        agreement = consensus.Round(self._next_round(optimizer, seen), failures, _fingerprint(seen), moment)
        pending = self._pending[optimizer] = _Pending(rows, seen, agreement, progress)
        self._open.append(pending)
        return pending

    def _observe(self, optimizer: Any, progress: Progress, model: nn.Module | None) -> Observed:
        """Observe the step of an optimizer that was just applied, and measure what that costs."""
        began = time.monotonic() - self.recorder.account.take_seconds()
        models = [model] if model is not None else self._known_models(optimizer)
        step = progress.applied + progress.skipped
        seen = observe(
            self.recorder, models, optimizer, policy=self.plan.policy, kept=self.plan.allowed(BF16), step=step
        )
        self._models[optimizer] = [weakref.ref(found) for found in models]
        self.reporter.report_remarks(seen.remarks)
        seen.skipped = progress.skipped
        seen.left_out = {**self.left_out, **self.left_out_for.get(optimizer, {})}
        self.recorder.account.take_seconds()  # they are a part of what was measured here
        progress.cost = time.monotonic() - began
        return seen

    def was_observed(self, optimizer: Any) -> bool:
        """True if an optimizer was in force at its last look, and nothing is recorded of its present step."""
        progress = self._progress.get(innermost(optimizer))
        recorded = self.recorder.active and self.recorder.backwards
        return not recorded and progress is not None and bool(progress.looks) and not progress.failed

    def models_of(self, optimizer: Any) -> list[nn.Module]:
        """Return the outermost models of an optimizer, and keep them for the next look."""
        found = self._known_models(optimizer) or models_of(updated_by(optimizer))
        self._models[optimizer] = [weakref.ref(model) for model in found]
        return found

    def _known_models(self, optimizer: Any) -> list[nn.Module]:
        """Return the models that were found; none if one of them no longer exists."""
        known = self._models.get(optimizer, ())
        models = [found for ref in known if (found := ref()) is not None]
        return models if len(models) == len(known) else []

    def check_limits(self) -> None:
        """Raise `NotInForce` if the first proof has been delayed for too many backward passes."""
        if not self.waiting or self._pending or any(progress.proven for progress in self.run):
            return
        if self.recorder.backwards <= 1:
            consensus.remember_group()
            plan_exchange.check(self.plan, self.refuse)
        if self._without_optimizer and self._script.repeats and self._script.is_proof_due():
            self._prove_script_update()
        if self.recorder.backwards > BACKWARD_LIMIT:
            self._conclude_unproven(
                f"{self.recorder.backwards} backward passes without a step of a torch.optim.Optimizer. Step an "
                "optimizer that is derived from it"
            )

    @property
    def _without_optimizer(self) -> bool:
        """True if nothing is proven yet, and there is nothing whose step could be."""
        return self.proof is None and not (self.optimizers or self.recorder.engines or self.run)

    @property
    def looks_at_passes(self) -> bool:
        """True if backward passes are counted in the place of steps."""
        return self._listening and self._script_progress is not None

    def backward_ended(self, leaves: list[torch.Tensor], *, accumulates: bool) -> None:
        """Observe a backward pass of a script without optimizers, which may update its weights itself.

        leaves: those whose gradients it has made; empty between looks. accumulates: False if it has returned them.
        """
        if not (accumulates or self._script.applies_returned):
            return
        if self._script_progress is not None:
            self._look_at_script(self._script_progress, leaves)
            return
        if not (self.waiting and self._without_optimizer and leaves):
            return
        script = self._script
        if not script.passes:
            # Those that were created before mpguard was activated, and that the pass reached.
            reached = {id(leaf) for leaf in leaves}
            self.optimizers.update(
                each
                for each in existing_optimizers()
                if any(own.grad is not None or id(own) in reached for own in updated_by(each))
            )
            if self.optimizers:
                return
        script.record_pass(leaves, accumulates=accumulates)
        if script.due:
            with self.recorder.ignoring_collectives():
                self.recorder.record_step(script.update)
                script.seen[script.kind] = observe(
                    self.recorder, [], script.update, policy=self.plan.policy, kept=self.plan.allowed(BF16),
                    step=script.passes,
                )  # fmt: skip
        if script.due or not self.recorder.account.active:
            self.recorder.account.restart()
            self.recorder.account.resume()

    @property
    def _script_progress(self) -> Progress | None:
        """The passes of a script that updates its weights itself, once they are proven; None if there are none."""
        progress = self._progress.get(self._script.update)
        in_force = progress is not None and progress.proven and not progress.failed
        return progress if in_force and not self.optimizers else None

    def _look_at_script(self, progress: Progress, leaves: list[torch.Tensor]) -> None:
        """Count a backward pass of such a script, and look at passes 4, 8, 16, ...; each rank for itself."""
        progress.applied += 1
        update = self._script.update
        if leaves:
            update.replace(leaves)
        self._refuse_cast(casts.ADVICE, update, (), {})
        if self.recorder.active:
            with self.recorder.ignoring_collectives():
                self.recorder.record_step(update)
                rows, seen, failures = self._observe_again(update, progress, None)
            self.budget.spent += progress.cost
            last = self._script.is_last_of_look()
            progress.next_look = progress.propose(self.budget) if last else progress.applied + 1
            self.recorder.stop()
            self._conclude_look(progress, rows, seen, failures, agreed=False)
        if progress.applied + 1 == progress.next_look:
            self._record(whole=False)

    def _prove_script_update(self, wait: float = consensus.AGREEMENT_WAIT) -> None:
        """Prove what was observed, after the script itself has updated the weights."""
        progress = self._progress_of(self._script.update)
        progress.applied = max(seen.step for seen in self._script.seen.values())
        found = [(checks.compare(seen, self.plan), seen) for seen in self._script.seen.values()]
        each = [checks.failures(rows, self.plan, seen) for rows, seen in found]
        failures = list(dict.fromkeys(failure for own in each for failure in own))
        rows, seen = next((pair for pair, own in zip(found, each, strict=True) if own), found[-1])
        with self.recorder.ignoring_collectives():
            name = self._next_round(self._script.update, seen)
            agreement = consensus.Round(name, failures, _fingerprint(seen), self.recorder.backwards)
            everywhere = agreement.result(wait)
        progress.prove(agrees=False)
        self.recorder.stop()
        self._conclude(_Pending(rows, seen, agreement, progress), everywhere, progress)

    def _check_skipped(self, progress: Progress) -> None:
        """Raise `NotInForce` if too many steps in a row were skipped: of one optimizer, or before any was proven."""
        in_a_row = progress.skipped_in_a_row
        if in_a_row <= SKIPPED_LIMIT or progress.failed or self._pending:
            return
        reason = (
            f"{in_a_row} optimizer steps in a row were skipped; the loss scale does not settle. Check "
            "the loss and the gradients for inf and NaN"
        )
        if not any(other.proven for other in self.run):
            self._conclude_unproven(reason)
        elif progress.proven:
            failure = Failure(FailureKind.WRONG, reason, "scaler")
            self._fail_alone(progress, failure, before=f"step {progress.applied + progress.skipped}: ")

    def observing_load(self, record: Callable[[], None]) -> None:
        """Record what a checkpoint has loaded; a failure of that is not one of the run."""
        try:
            record()
        except Exception:
            log.debug("mpguard: what was loaded could not be observed", exc_info=True)

    def _report_loaded(self, optimizer: Any) -> None:
        """Print what was loaded from a checkpoint, once."""
        scaler = self.recorder.scalers.get(id(optimizer))
        by_torch = scaler is not None and scaler["kind"] != ENGINE_SCALER
        for line in self.loaded.report(scaler if by_torch else None):
            self.reporter.print_once(line)

    def states_loaded(self, optimizer: Any, saved: Any) -> None:
        """Record that an optimizer has loaded states, and repeat the proof.

        What has no states, loaded before the first step, is no checkpoint: accelerate moves its optimizers so.
        """
        progress = self._progress.get(optimizer)
        stepped = progress is not None and progress.applied + progress.skipped > 0
        if not stepped and isinstance(saved, Mapping) and not saved.get("state"):
            return
        self.observing_load(lambda: self.loaded.states(optimizer, saved))
        self.rearm()

    def rearm(self) -> None:
        """Repeat the proof at the next applied step: a loaded checkpoint can change dtypes."""
        if self.proof is None or self.refusal is not None:
            return
        self.recorder.stop()
        self._previous_proof, self.proof = self.proof, None
        self._repetition += 1
        self.recorder.values.forget()
        self._looking.clear()
        self._pending.clear()
        self._open.clear()
        self._models.clear()
        for progress in self.run:
            progress.proven = False
        if self._listening:
            self._record(whole=True)

    # -- looks -------------------------------------------------------------------------------

    def _record(self, *, whole: bool, in_step: bool = False) -> None:
        """Start a recorder for the next step, unless one is recording.

        whole: True between the steps of all optimizers. After the step of one, the others may step for gradients that
        were not recorded. in_step: True while an optimizer's `step` runs, see `StepAccount.restart`.
        """
        if not self.recorder.active:
            self.recorder = Recorder(self.recorder, self.optimizers)
            self.recorder.start(self.plan.policy, in_step=in_step)
            self._recording, self._whole = self._recording + 1, whole

    def _await(self, progress: Progress, *, in_step: bool = False) -> None:
        """Record the next step of an optimizer that has not been proven: for some steps of the others, not for ever."""
        self._newcomer_steps = NEWCOMER_STEPS
        self._record(whole=False, in_step=in_step)
        progress.recording = self._recording

    def _open_look(self, optimizer: Any, progress: Progress, *, in_step: bool = False) -> None:
        """Record the next step if it is to be looked at."""
        due = progress.applied + 1 == progress.next_look
        if not due and progress.switches != self.switches:
            due = self.budget.allows(progress.cost)
        if due:
            progress.switches = self.switches
            self._looking.add(progress)
            self._record(whole=False, in_step=in_step)
            self.recorder.begin_gap(optimizer, updated_by(optimizer))

    def _close_round(self) -> None:
        """Stop to record, unless a step is looked at, or the first step of a new optimizer is still expected."""
        self._newcomer_steps = max(0, self._newcomer_steps - 1)
        if self.recorder.active and not self._looking and not self._newcomer_steps:
            self.recorder.stop()

    def _look(self, optimizer: Any, progress: Progress, model: nn.Module | None) -> None:
        """Look at a step that was just applied: observe, compare, agree with the other ranks. Raises `NotInForce`."""
        agreed = progress.applied == progress.next_look
        if model is None and not self.recorder.record_step(optimizer):
            self._look_again(progress, agreed=agreed)
            return  # there was no gradient to apply
        progress.empty = 0
        self._looking.discard(progress)
        with self.recorder.ignoring_collectives():
            rows, seen, failures = self._observe_again(optimizer, progress, model)
            self.budget.spent += progress.cost
            if agreed and progress.agrees:
                proposal = progress.propose(self.budget)
                report = consensus.Report(failures, _fingerprint(seen) if seen else None, next_look=proposal)
                point = f"look/{progress.number}/{progress.applied}"
                agreement = consensus.agree(point, report, consensus.LOOK_TIMEOUT)
                rows, failures = checks.unsynchronized(rows, agreement.failures, self.plan)
                progress.next_look = agreement.next_look
                if agreement.missing:
                    progress.agrees = False
                    self.reporter.report_missing(progress, agreement.missing)
        if agreed and not progress.agrees:
            progress.next_look = progress.propose(self.budget)
        self._close_round()
        self._conclude_look(progress, rows, seen, failures, agreed=agreed and progress.agrees)

    def _look_again(self, progress: Progress, *, agreed: bool) -> None:
        """Look at the next step in place of one without gradients; after some of these, at a later one."""
        progress.empty += 1
        if progress.empty < EMPTY_STEPS:
            progress.next_look = progress.applied + 1 if agreed else progress.next_look
            return
        if progress.empty == EMPTY_STEPS:
            self.reporter.report_empty(progress)
        self._looking.discard(progress)
        progress.leave_out_look()
        self._close_round()

    def _observe_again(
        self, optimizer: Any, progress: Progress, model: nn.Module | None
    ) -> tuple[tuple[Row, ...], Observed | None, list[Failure]]:
        """Return rows, facts and failures of a step; no facts if mpguard's own code fails, which must not end a run."""
        try:
            seen = self._observe(optimizer, progress, model)
            rows = checks.compare(seen, self.plan)
            return rows, seen, checks.failures(rows, self.plan, seen)
        except Exception as error:
            self.reporter.report_error(progress, error)
            return (), None, []

    def _conclude_look(
        self, progress: Progress, rows: tuple[Row, ...], seen: Observed | None, failures: list[Failure], *, agreed: bool
    ) -> None:
        """Record the result of a look, and fail if there are failures. agreed: True if all ranks have the same."""
        wrong = [failure for failure in failures if failure.kind is FailureKind.WRONG]
        if not wrong:
            in_force = seen is not None and checks.verdict_on(rows, self.plan, failures) == IN_FORCE
            progress.looks += [progress.applied] if in_force else []
            progress.without_result += not in_force
            self.reporter.report_look(self.proof, self.run, failures)
            return
        last = f"; step {progress.looks[-1]} was in force" if progress.looks else ""
        self.proof = Proof(NOT_IN_FORCE, self.plan, rows, tuple(wrong), seen)
        self.reporter.report_proof(self.proof, first=True, repeated=False, optimizers=1, run=self.run)
        before = f"step {progress.applied + progress.skipped}: "
        if agreed:
            progress.failed = True
            self.fail(Refusal(tuple(wrong), before, last))
        else:
            self._fail_alone(progress, *wrong, before=before, after=last)

    def switch_to_evaluation(self) -> None:
        """Look at a step after the one that follows: a model was switched to evaluation."""
        self.switches += 1

    def optimizer_created(self, optimizer: Any) -> None:
        """Register an optimizer; one that is created after the first proof is proven at its own first step."""
        if self.refusal is not None and world_size() == (1, 1):
            self._begin_after_refusal()
        self.recorder.several |= self._optimizer_existed
        self._optimizer_existed = True
        self.optimizers.add(optimizer)
        self._unstepped[optimizer] = 0
        if self._listening and self.proof is not None and self.refusal is None and not self.engine_depth:
            self._await(self._progress_of(optimizer))

    def group_added(self, optimizer: Any) -> None:
        """Look at the next step of an optimizer that has got another group of parameters."""
        progress = self._progress.get(optimizer)
        if progress is not None and progress.proven and not progress.failed and self.refusal is None:
            self._models.pop(optimizer, None)
            progress.next_look = progress.applied + 1
            self._open_look(optimizer, progress)

    # -- casts -------------------------------------------------------------------------------

    def trained_parameters(self) -> dict[int, Any]:
        """Return the optimizer of each parameter that is trained and was proven, by the parameter's id."""
        found: dict[int, Any] = {}
        for optimizer, progress in self._progress.items():
            if progress.proven and not progress.failed:
                models = [model for ref in self._models.get(optimizer, ()) if (model := ref()) is not None]
                copies = [own for model in models if casts.is_engine(model) for own in model.parameters()]
                found |= {id(parameter): optimizer for parameter in [*updated_by(optimizer), *copies]}
        return found

    def weights_cast(self, optimizer: Any, what: str, advice: str = casts.ADVICE) -> None:
        """Report that weights of an optimizer were cast, and refuse its next step.

        what: the cast, or what else was done to the weights, and where it is. advice: what to do instead.
        """
        progress = self._progress[optimizer]
        if progress.cast is None and optimizer is not self._script.update:
            optimizer.register_step_pre_hook(untraced(functools.partial(self._refuse_cast, advice)))
        progress.cast = what
        self.reporter.report_cast(what, self.plan.enforce)

    def _refuse_cast(self, advice: str, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        progress = self._progress_of(optimizer)
        if progress.cast is not None and not progress.failed and self.refusal is None:
            text = f"weights: {progress.cast}, and training continued with them"
            self._fail_alone(progress, Failure(FailureKind.WRONG, text, "weights", advice=advice))

    def tensors_are_exchanged(self, tensors: Collection[torch.Tensor]) -> None:
        """Release weak references to tensors that are going to be exchanged: torch refuses it where there are any."""
        self._script.release({id(tensor) for tensor in tensors})
        self.recorder.tensors_are_exchanged(tensors)

    def weights_loaded(self, module: nn.Module) -> None:
        """Forget casts of weights that were loaded since, and values from before."""
        self._script.forget()
        self.recorder.values.forget()
        self.recorder.by_hand.forget()
        trained = self.trained_parameters() if any(progress.cast for progress in self.run) else {}
        for parameter in module.parameters() if trained else ():
            if id(parameter) in trained:
                self._progress[trained[id(parameter)]].cast = None

    # -- the proof ---------------------------------------------------------------------------

    def _next_round(self, optimizer: Any, seen: Observed) -> str:
        """Return the name of the next agreement: the same on all ranks, also after one of them loads a checkpoint.

        Models that a rank trains for itself are counted separately.
        """
        kind = "alone" if is_unsynchronized(seen) else "together"
        if optimizer in self._observed:
            kind = f"again/{self._repetition}/{kind}"
        self._observed.add(optimizer)
        self._rounds[kind] += 1
        return f"{self._number}/{kind}/{self._rounds[kind]}"

    def _conclude(self, pending: _Pending, everywhere: list[Failure] | None, progress: Progress) -> None:
        """Report the proof, and fail if there are failures. everywhere: of all ranks; None if ranks are missing."""
        if everywhere is not None:
            plan_exchange.check_settled(self.plan, self.refuse)
        if everywhere is None:
            self.alone = True
            missing = names_of(pending.agreement.missing())
            text = f"no result from {missing}: no step of this optimizer was applied there"
            everywhere = [*pending.agreement.failures, Failure(FailureKind.UNPROVEN, text)]
        rows, everywhere = checks.unsynchronized(pending.rows, everywhere, self.plan)
        verdict = checks.verdict_on(rows, self.plan, everywhere)
        proof = Proof(verdict, self.plan, rows, tuple(everywhere), pending.seen)
        first = self.proof is None
        if first or not proof.in_force:
            self.proof = proof
        if everywhere:
            self.recorder.stop()
        progress.failed = bool(everywhere)
        progress.looks += [pending.applied] if proof.in_force else []
        progress.without_result += not everywhere and not proof.in_force
        self.reporter.report_proof(
            proof, first=first, repeated=self._previous_proof is not None,
            optimizers=sum(each.proven for each in self.run), run=self.run,
        )  # fmt: skip
        if everywhere:
            self.fail(Refusal(tuple(everywhere)))

    def _conclude_unproven(self, reason: str) -> None:
        """Report a failure that is found before there is anything to compare, and fail."""
        failure = Failure(FailureKind.UNPROVEN, reason)
        proof = Proof(NOT_PROVEN, self.plan, failures=(failure,))
        self.proof = self.proof or proof
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

    def _fail_alone(self, progress: Progress, *failures: Failure, before: str = "", after: str = "") -> None:
        """Fail on this rank: the others may not have the failure, or not at this step. Raises `NotInForce`.

        before, after: text around the failures, see `Refusal`.
        """
        progress.failed = self.alone = True
        self._looking.discard(progress)
        refusal = Refusal(failures, before, after)
        if self.proof is not None:
            self.proof = dataclasses.replace(self.proof, verdict=NOT_IN_FORCE, failures=tuple(refusal.published()))
            self.reporter.update_proof(self.proof, self.run)
        self.fail(refusal)

    def fail(self, refusal: Refusal) -> None:
        """Raise `NotInForce`; with `enforce` warn or off, report the failures and return."""
        if self.plan.enforce == "error":
            self.recorder.stop()  # a profiler that still runs crashes the process at its end
            self.refusal, self.refused = refusal, self.refused or refusal
            consensus.publish_end(refusal.published())
            raise not_in_force(refusal)
        self.warned = self.warned or refusal
        self.reporter.warn_failure(refusal, self.plan.enforce, alone=self.alone)

    def leave_out(self, field: str, reason: str, optimizer: Any = None) -> None:
        """Report, now and in the proof, that the run goes without what its recipe would like.

        optimizer: the only one that the reason concerns.
        """
        found = self.left_out if optimizer is None else self.left_out_for.setdefault(optimizer, {})
        found[field] = reason
        at_start = left_out_at_start(self.plan.policy, self.plan.strategy) if self.plan.announced else {}
        if at_start.get(field) != reason:
            self.reporter.print_once(f"mpguard: {field} is off here: {reason}")

    # -- the end -----------------------------------------------------------------------------

    @property
    def trained(self) -> bool:
        """True if this process has computed gradients, and there is no first proof yet."""
        if is_idle() or (self._without_optimizer and self._script.is_idle()):
            return False  # gradients of a model that is not trained
        return self.waiting and self.proof is None and bool(self.recorder.backwards or self.recorder.updated)

    def finalize(self, status: int) -> None:
        """Conclude the run: report all of it, or that it ends without a proof. status: the script's.

        Raises `NotInForce`.
        """
        for progress in self.run:
            with contextlib.suppress(Exception):
                if progress.unread:
                    self._count_unread(progress, but_last=False)
        if not status and self._without_optimizer and self._script.is_proof_due():
            self._prove_script_update(consensus.FINAL_WAIT)
        if self.proof is not None:
            self._finalize_unrecorded(status)
            self._finalize_alone(status)
            self.reporter.report_run(self.proof, self.run)
            return
        if self._previous_proof is not None and not self.trained and not self._open:
            self.proof = self._previous_proof  # the checkpoint was loaded, but no training followed
            self.reporter.report_run(self.proof, self.run)
            return
        if self._open and not status:
            self._finalize_open(self._open[0])
            return
        trained, enforced = self.trained, self.plan.enforce != "off"
        failure = unproven_at_exit(
            enforced=enforced,
            trained=trained,
            # A scaler calls a fused optimizer at the steps that it skips, too.
            without_gradients=bool(self.step_calls) and not self.skipped and not self.recorder.updated,
            without_optimizer=bool(self._script.passes) and self._without_optimizer,
            skipped=self.skipped,
            status=status,
            first_scale=self.first_scale,
        )
        self.proof = Proof(NOT_PROVEN, self.plan, failures=(failure,))
        if trained or not self.spawned:
            self.reporter.write_proof(self.proof, self.run, replace=trained)
        consensus.publish_end([failure])
        if trained and not status and not has_failed():
            self.alone = True
            self.fail(Refusal((failure,)))
        elif enforced and not status and not self.spawned:
            self.reporter.report_no_training()

    def _finalize_open(self, pending: _Pending) -> None:
        """Conclude a proof for which other ranks were waited for until the end."""
        repeated = self._previous_proof is not None
        everywhere = pending.agreement.result(consensus.REPEATED_WAIT if repeated else consensus.FINAL_WAIT)
        if everywhere is None and repeated and not pending.agreement.failures:
            self.proof = self._previous_proof  # the checkpoint was loaded on this rank only
        else:
            self._conclude(pending, everywhere, pending.progress)
        if self.proof is not None:
            self.reporter.report_run(self.proof, self.run)

    def _finalize_alone(self, status: int) -> None:
        """Conclude the proofs of optimizers that other ranks have never stepped, next to what all train together."""
        if status or self.refusal is not None or not (self.proof and self.proof.in_force):
            return
        for pending in list(self._open):
            everywhere = pending.agreement.result(consensus.REPEATED_WAIT)
            if everywhere is None:
                missing = names_of(pending.agreement.missing())
                pending.seen.world_size = 1  # it is proven for this rank only
                pending.rows = checks.trained_alone(pending.rows, missing)
                everywhere = checks.failures(pending.rows, self.plan, pending.seen)
            pending.progress.prove(agrees=False)
            self._conclude(pending, everywhere, pending.progress)

    def _finalize_unrecorded(self, status: int) -> None:
        """Fail if an optimizer has stepped, but never while its step was recorded."""
        if status or self.refusal is not None or not (self.proof and self.proof.in_force):
            return
        for progress, pending in self._unrecorded.items():
            if progress.unrecorded:
                progress.prove(agrees=False)
                self._conclude(pending, pending.agreement.result(consensus.FINAL_WAIT), progress)
        unseen = [progress for progress in self.run if progress.unrecorded]
        if not unseen:
            return
        text = (
            f"{', '.join(sorted({each.name for each in unseen}))} stepped only once, or rarely, after the others were "
            "proven, so nothing of its step was recorded"
        )
        failure = Failure(FailureKind.UNPROVEN, text, advice="Create it right before it is used")
        self.proof = dataclasses.replace(self.proof, verdict=NOT_PROVEN, failures=(failure,))
        self.reporter.update_proof(self.proof, self.run)
        self.fail(Refusal((failure,)))


def _only_initializes(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step changes nothing: torch.distributed.checkpoint allocates states so, with learning rate 0."""
    return all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)


def _fingerprint(seen: Observed) -> Fingerprint | None:
    """Return what ranks compare; None if weights are averaged in place of gradients."""
    return None if seen.averaging else seen.fingerprint


class _Pending:
    """What was observed at the step of an optimizer, and the agreement of all ranks about it, which may be open.

    applied: the number of that step among those that were applied.
    """

    def __init__(self, rows: tuple[Row, ...], seen: Observed, agreement: consensus.Round, progress: Progress) -> None:
        self.rows, self.seen, self.agreement, self.progress = rows, seen, agreement, progress
        self.applied = progress.applied

    @property
    def late(self) -> bool:
        """True if the ranks agree at a later step, which may be another one on each."""
        return self.progress.applied > self.applied


_current: Guard | None = None

#: Numbers of the guards of this process: ranks do not read what was agreed on under an earlier one.
_guards = itertools.count()

#: Numbers of the calls of `prove`; every rank has them in the same order.
_calls = itertools.count()

#: Numbers of the optimizers that all ranks have proven together, in that order.
_numbers = itertools.count()


def current() -> Guard | None:
    """Return the guard of this process; None if no policy was activated."""
    return _current


def set_current(guard: Guard | None) -> None:
    """Make a guard the guard of this process; None for none."""
    global _current  # noqa: PLW0603  one guard per process is the point
    _current = guard


def prove(model: nn.Module, optimizer: Any, policy: Policy | str) -> Proof:
    """Prove a model and its optimizer now, after an optimizer step, and return the proof.

    Compute and reductions are observed after `activate` only; what was not observed is not proven, and in low
    precision that is a failure, unless the active policy was in force at the last look: between looks nothing is
    recorded. With several processes all of them must call it, because the result is the same on all ranks. Raises
    `NotInForce`.
    """
    policy = given(policy, "prove")
    plan = Plan(policy)
    recorder = _current.recorder if _current is not None else Recorder()
    with recorder.ignoring_collectives():
        seen = observe(recorder, [] if model is None else [model], optimizer, policy=policy)
        rows = checks.compare(seen, plan)
        own = checks.failures(rows, plan, seen)
        observed = _current is not None and _current.plan.policy == policy and _current.was_observed(optimizer)
        if observed:
            own = [failure for failure in own if failure.kind is FailureKind.WRONG]
        agreement = consensus.Round(f"prove/{next(_calls)}", own, _fingerprint(seen))
        everywhere = agreement.result(consensus.PROVE_WAIT)
        if everywhere is None:
            everywhere = [*own, Failure(FailureKind.UNPROVEN, f"{names_of(agreement.missing())} did not call prove")]
    if everywhere:
        raise not_in_force(Refusal(tuple(everywhere)), overridden=False)
    verdict = IN_FORCE if observed else checks.verdict_on(rows, plan, [])
    return Proof(verdict, plan, rows, (), seen)
