"""When a process is proven, and what follows: one `Guard` per process.

After the first applied step of each optimizer, each rank observes and compares; the ranks then agree on the
failures, so that a mismatch on one rank is raised on all of them and no rank waits indefinitely. Skipped and
accumulated steps only delay the proof, within a limit. After a checkpoint has been loaded, the proof is repeated.

A check repeats that at later steps (see `progress`). Nothing is recorded between checks; there each step is counted,
and casts of the weights are reported (see `casts`). What is printed and written is in `reporter`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from mpguard.nn.compile import untraced
from mpguard.policy.allow import IDLE_RANKS, ranks_of
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import given
from mpguard.runtime import casts, plan_exchange
from mpguard.runtime.containment import contained_hook
from mpguard.runtime.first_proof import FirstProof
from mpguard.runtime.inspection import Inspection
from mpguard.runtime.messages import not_in_force
from mpguard.runtime.plan import Plan
from mpguard.runtime.progress import Budget
from mpguard.runtime.proof import account, consensus, program_threads
from mpguard.runtime.proof.checks.optimizer import ROUNDED_WEIGHTS
from mpguard.runtime.proof.observe import innermost, observe, updated_by
from mpguard.runtime.proof.recorder import Recorder
from mpguard.runtime.proof.report import Proof
from mpguard.runtime.proof.verdict import (
    IN_FORCE,
    Failure,
    FailureKind,
    Refusal,
)
from mpguard.runtime.proof.witness import describe
from mpguard.runtime.ranks import declare_idle, is_forked_after_cuda, is_idle, rank, world_size
from mpguard.runtime.run_state import OptimizerState, guard_numbers
from mpguard.runtime.script_guard import ScriptGuard

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("mpguard")

#: Backward passes without an optimizer step before the run counts as not proven: far beyond any gradient accumulation.
BACKWARD_LIMIT = 10_000


class Guard(FirstProof):
    """Enforces a plan in this process: schedules the inspections of each optimizer. See `activate`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        declare_idle(each for text in plan.allowed(IDLE_RANKS) for each in ranks_of(text))
        #: Calls of `step` of any optimizer.
        self.step_calls = 0
        #: Nested calls of an engine that calls its optimizer itself.
        self.engine_depth = 0
        #: The process that the run is in: one that it forks has none.
        self.process = os.getpid()
        #: True if the end of the run was concluded.
        self.finished = False
        #: True if the script started this process, maybe to load data: it is not reported that it does not train.
        self.spawned = False
        #: True if mpguard converts and compiles models when an optimizer is created; False where an `Accelerator` does.
        self.converts_models = self.compiles_models = True
        #: Where the last dynamic loss scale begins that was created.
        self.first_scale: float | None = None
        #: What proves scripts without an optimizer.
        self.script = ScriptGuard(self)
        self._optimizer_existed = False

    def listen(self) -> None:
        """Start to observe optimizer steps, and start the recorder. Needs torch."""
        if self.plan.enforce == "off" or self._listening:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        check = contained_hook(self._optimizer_stepped, "the check of an optimizer step")
        register_optimizer_step_post_hook(untraced(check))
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
        self.refused = self.reporter.warned = None
        self._states.clear()
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
        for optimizer in [*self.optimizers, *self._states]:
            self.state_of(optimizer).refused = self.refusal
        self.optimizers.clear()
        self.alone = self.reporter.writes_file = False
        self._number = next(guard_numbers)
        self._forget()

    def _forget(self) -> None:
        """Forget what has happened, and record again if optimizer steps are observed."""
        self.proof = self.refusal = self.previous_proof = None
        self.without_gradients = ""
        self.step_calls = self.switches = self._newcomer_steps = self._repetition = 0
        self.run, self.budget = [], Budget()
        self.script.begin_again()
        for optimizer, state in list(self._states.items()):
            self._states[optimizer] = OptimizerState(refused=state.refused)
        for known in (self._under_check, self._rounds, self._unstepped, self.unrecorded):
            known.clear()
        self.open_inspections.clear()
        if self._listening:
            self.recorder.stop()
            self.record(whole=True)

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.step_calls += 1
        if (refused := self.state_of(optimizer).refused) is not None:
            raise not_in_force(refused, again=True)
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
        progress = self.progress_of(optimizer)
        if self._read_infinities(optimizer, progress):
            self.step_applied(optimizer)
        self.measure(optimizer)

    def step_begins(self, optimizer: Any) -> None:
        """Record the gradients with which a step begins, and compare weights whose memory has been replaced."""
        program_threads.uses(optimizer)
        if self.waiting:
            self.recorder.begin_step(optimizer)
        progress = self.known_progress(optimizer)
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
            self.fail_alone(progress, failure, before=f"step {progress.applied + progress.skipped + 1}: ")
            return

    def step_skipped(self, optimizer: Any) -> None:
        """Count a step that was skipped because of an overflow. Raises `NotInForce` beyond the limit."""
        import torch

        optimizer = innermost(optimizer)
        if self._listening and isinstance(optimizer, torch.optim.Optimizer):
            progress = self.progress_of(optimizer)
            self._remark_on_skipped(optimizer)
            self._count_skipped(progress, True)
            self._follow_schedule(optimizer, progress, skipped=True)
            if self.proof is not None and not progress.proven and not self._whole:
                self._await(progress)

    def step_applied(self, optimizer: Any, model: nn.Module | None = None) -> None:
        """Count an applied step; prove the optimizer at its first one, and check a later one. Raises `NotInForce`.

        model: the engine that has called the optimizer, if one has.
        """
        if not self._listening:
            return
        optimizer = innermost(optimizer)
        progress = self.progress_of(optimizer)
        if is_idle() and self.refusal is None:
            self.alone = True
            self.conclude_unproven(f"allow: idle_ranks names rank {rank()}, and {progress.name} was stepped there")
        progress.count_applied()
        if progress.skipped:
            self._follow_schedule(optimizer, progress, skipped=False)
        self._compare_regions(progress, checked=not progress.proven or progress in self._under_check)
        if not progress.proven:
            self._prove_first(optimizer, progress, model)
        elif progress in self._under_check:
            self._check_step(optimizer, progress, model)
        else:
            self._close_round()
        if progress.proven and not progress.failed:
            self._open_check(optimizer, progress, in_step=True)

    def was_observed(self, optimizer: Any) -> bool:
        """True if an optimizer was in force at its last check, and nothing is recorded of its present step."""
        progress = self.known_progress(innermost(optimizer))
        recorded = self.recorder.active and self.recorder.backwards
        return not recorded and progress is not None and bool(progress.checks) and not progress.failed

    def check_limits(self) -> None:
        """Raise `NotInForce` if the first proof has been delayed for too many backward passes."""
        if not self.waiting or self.open_inspections or any(progress.proven for progress in self.run):
            return
        if self.recorder.backwards <= 1:
            consensus.remember_group()
            plan_exchange.check(self.plan, self.refuse)
        self.script.prove_if_repeated()
        if self.recorder.backwards > BACKWARD_LIMIT:
            self.conclude_unproven(
                f"{self.recorder.backwards} backward passes without a step of a torch.optim.Optimizer. Step an "
                "optimizer that is derived from it"
            )

    @property
    def counts_passes(self) -> bool:
        """True if backward passes are counted in the place of steps."""
        return self._listening and self.script.progress is not None

    def backward_ended(self, leaves: list[torch.Tensor], *, accumulates: bool) -> None:
        """Observe a backward pass of a script without optimizers: see `ScriptGuard`."""
        self.script.backward_ended(leaves, accumulates=accumulates)

    def observing_load(self, record: Callable[[], None]) -> None:
        """Record what a checkpoint has loaded; a failure of that is not one of the run."""
        try:
            record()
        except Exception:
            log.debug("mpguard: what was loaded could not be observed", exc_info=True)

    def states_loaded(self, optimizer: Any, saved: Any) -> None:
        """Record that an optimizer has loaded states, and repeat the proof.

        What has no states, loaded before the first step, is no checkpoint: accelerate moves its optimizers so.
        """
        progress = self.known_progress(optimizer)
        stepped = progress is not None and progress.applied + progress.skipped > 0
        if not stepped and isinstance(saved, Mapping) and not saved.get("state"):
            return
        self.observing_load(lambda: self.loaded.states(optimizer, saved))
        if progress is not None and stepped and (dtype := self.loaded.narrower_states):
            progress.loaded_from["states"] = dtype
        self.rearm()

    def rearm(self) -> None:
        """Repeat the proof at the next applied step: a loaded checkpoint can change dtypes."""
        if self.proof is None or self.refusal is not None:
            return
        self.recorder.stop()
        self.previous_proof, self.proof = self.proof, None
        self._repetition += 1
        self.recorder.values.forget()
        self._under_check.clear()
        self.open_inspections.clear()
        for state in self._states.values():
            state.pending, state.models = None, []
        for progress in self.run:
            progress.proven = False
        if self._listening:
            self.record(whole=True)

    # -- optimizers ----------------------------------------------------------------------

    def optimizer_created(self, optimizer: Any) -> None:
        """Register an optimizer; one that is created after the first proof is proven at its own first step."""
        if self.refusal is not None and world_size() == (1, 1):
            self._begin_after_refusal()
        self.recorder.several |= self._optimizer_existed
        self._optimizer_existed = True
        program_threads.uses(optimizer)
        self.optimizers.add(optimizer)
        self._unstepped.add(optimizer)
        if self._listening and self.proof is not None and self.refusal is None and not self.engine_depth:
            self._await(self.progress_of(optimizer))

    def group_added(self, optimizer: Any) -> None:
        """Check the next step of an optimizer to which a group of parameters was added."""
        progress = self.known_progress(optimizer)
        if progress is not None and progress.proven and not progress.failed and self.refusal is None:
            self.state_of(optimizer).models = []
            progress.next_check = progress.applied + 1
            self._open_check(optimizer, progress)

    # -- casts ---------------------------------------------------------------------------

    def trained_parameters(self) -> dict[int, Any]:
        """Return the optimizer of each parameter that is trained and was proven, by the parameter's id."""
        found: dict[int, Any] = {}
        for optimizer, state in self._states.items():
            if state.progress is not None and state.progress.proven and not state.progress.failed:
                models = [model for ref in state.models if (model := ref()) is not None]
                copies = [own for model in models if casts.is_engine(model) for own in model.parameters()]
                found |= {id(parameter): optimizer for parameter in [*updated_by(optimizer), *copies]}
        return found

    def weights_cast(self, optimizer: Any, what: str, advice: str = casts.ADVICE) -> None:
        """Report that weights of an optimizer were cast, and refuse its next step.

        what: the cast, or what else was done to the weights, and where it is. advice: what to do instead.
        """
        progress = self.progress_of(optimizer)
        if progress.cast is None and optimizer is not self.script.update:
            optimizer.register_step_pre_hook(untraced(functools.partial(self.refuse_cast, advice)))
        progress.cast = what
        self.reporter.report_cast(what, self.plan.enforce)

    def tensors_are_exchanged(self, tensors: Collection[torch.Tensor]) -> None:
        """Release weak references to tensors that are going to be exchanged: torch refuses it where there are any."""
        self.script.release({id(tensor) for tensor in tensors})
        self.recorder.tensors_are_exchanged(tensors)

    def weights_loaded(self, module: nn.Module) -> None:
        """Forget casts of weights that were loaded since, and values from before; record a load from fewer bits."""
        self.script.forget()
        self.recorder.values.forget()
        self.recorder.by_hand.forget()
        trained = self.trained_parameters()
        for parameter in module.parameters() if trained else ():
            if id(parameter) in trained:
                progress = self.progress_of(trained[id(parameter)])
                progress.cast = None
                progress.loaded_from.pop("weights", None)
                if dtype := self.loaded.narrower(module):
                    progress.loaded_from["weights"] = dtype

    # -- the end -------------------------------------------------------------------------

    @property
    def is_unproven(self) -> bool:
        """True until the first proof, or the end of the run without one."""
        return self.proof is None and self.refusal is None and not self.finished

    @property
    def trained(self) -> bool:
        """True if this process has computed gradients, and there is no first proof yet."""
        if is_idle() or (self.without_optimizer and self.script.is_idle()):
            return False  # gradients of a model that is not trained
        return self.waiting and self.proof is None and bool(self.recorder.backwards or self.recorder.updated)


def _only_initializes(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step changes nothing: torch.distributed.checkpoint allocates states so, with learning rate 0."""
    return all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)


_current: Guard | None = None

#: Numbers of the calls of `prove`; every rank has them in the same order.
_calls = itertools.count()


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
    precision that is a failure, unless the active policy was in force at the last check: between checks nothing is
    recorded. With several processes all of them must call it, because the result is the same on all ranks. Raises
    `NotInForce`.
    """
    policy = given(policy, "prove")
    plan = Plan(policy)
    recorder = _current.recorder if _current is not None else Recorder()
    with recorder.ignoring_collectives():
        seen = observe(recorder, [] if model is None else [model], optimizer, policy=policy)
        inspection = Inspection(plan, seen)
        observed = _current is not None and _current.plan.policy == policy and _current.was_observed(optimizer)
        if observed:
            inspection.failures = [each for each in inspection.failures if each.kind is FailureKind.WRONG]
        inspection.publish(f"prove/{next(_calls)}")
        everywhere = inspection.agree(consensus.PROVE_WAIT)
        if everywhere is None:
            everywhere = inspection.without(f"{inspection.missing()} did not call prove")
    if everywhere:
        raise not_in_force(Refusal(tuple(everywhere)), overridden=False)
    proof = inspection.conclude([])
    return dataclasses.replace(proof, verdict=IN_FORCE) if observed else proof
