"""When a process is proven, and what follows: one `Guard` per process.

After the first step that is applied of each optimizer, each rank observes and compares; the verdict
is made over all ranks, so that a mismatch on one is raised on all and none waits for ever. Skipped and
accumulated steps only delay it, within a limit. After a checkpoint has been loaded it is made anew.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import io
import itertools
import logging
import multiprocessing
import os
import re
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpguard import hardware
from mpguard.conversion.choice import plain_name
from mpguard.errors import ConfigError, NotCarried, NotInForce, NotProven
from mpguard.plugin import Change, gathers, require_carried
from mpguard.policy import Policy
from mpguard.recipes import recipe
from mpguard.runtime import compiling, imports, proof, verdict
from mpguard.runtime.observe import Observed, innermost, models_of, observe, updated_by
from mpguard.runtime.plan import Plan, enforcement
from mpguard.runtime.proof import Proof, Row
from mpguard.runtime.recorder import Recorder
from mpguard.runtime.verdict import number, rank

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("mpguard")

#: Steps skipped in a row before the run counts as not proven: a dynamic scale from 2**32 with
#: hysteresis 2 needs at most 64 to come down to 1.
SKIPPED_LIMIT = 128

#: Backward passes and no optimizer step: far beyond any gradient accumulation.
BACKWARD_LIMIT = 10_000

#: Of how many further optimizers it is said that they are proven too.
MENTIONED = 3


class Guard:
    """Keeps a plan in force in this process. See `activate`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.recorder = Recorder()
        self.proof: Proof | None = None
        self.failure: str | None = None
        self.steps = 0
        self.stepped = 0
        self.engine_depth = 0
        self.process = os.getpid()
        self.exit_status = 0
        self.converts = True
        self._listening = False
        self._crashed = False
        self._finished = False
        self._worker = False
        self._said: set[str] = set()
        self._again = False
        self._proven: weakref.WeakSet[Any] = weakref.WeakSet()
        self._alone: weakref.WeakKeyDictionary[Any, tuple[tuple[Row, ...], Observed]] = weakref.WeakKeyDictionary()

    # -- beginning ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Says the header, where the launcher half has not, and waits for the libraries to come in."""
        from mpguard.runtime import patches

        if number("WORLD_SIZE", 1) > 1:
            whole_lines()
            atexit.register(let_gloo_finish)
        if not self.plan.announced and rank() == 0:
            proof.say(header(self.plan))
        self.check_start()
        self._write(None)
        patches.apply()
        imports.after("torch", self._torch_is_here)
        imports.after("transformer_engine", lambda _: self.recorder.listen_to_modules())
        if self.plan.enforce == "error":
            self._mind_hard_exits()

    def check_start(self) -> None:
        """What a worker knows before it trains. Raises `NotInForce`."""
        if self.plan.enforce == "error" and (reason := compiling.refused(self.plan.policy)):
            raise NotInForce(reason)
        launched, asked = number("WORLD_SIZE", 1), self.plan.processes
        if asked is not None and launched != asked and self.plan.enforce == "error":
            raise NotInForce(
                f"{self.plan.config or 'the plan'} asks for {asked} process{'es' if asked > 1 else ''}, "
                f"{launched} {'was' if launched == 1 else 'were'} started; "
                "stock accelerate starts one for MULTI_CPU. Use `mpguard launch --config`, `torchrun --nproc_per_node "
                f"{asked}`, or set `num_processes: {launched}`"
            )

    def _torch_is_here(self, _module: ModuleType) -> None:
        with quiet():
            if self.plan.policy.tf32 is not None:
                self.plan.policy.to("torch").set_tf32()
        if self.plan.enforce == "off" or self._listening:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._optimizer_stepped)
        self.recorder.start(self.plan.policy)
        self._listening = True

    def say(self, text: str) -> None:
        """A line of rank 0's, once."""
        if text not in self._said and rank() == 0:
            self._said.add(text)
            proof.say(text)

    def say_change(self, where: str, change: Change) -> None:
        """An override, aloud and once: key, old value, new value."""
        text = f"{where}: {change}"
        if text in self._said:
            return
        self._said.add(text)
        log.log(logging.WARNING if rank() == 0 else logging.DEBUG, "%s", text)

    def convert(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes FP8 layers in the models that an optimizer will update, where the policy asks for them.

        A model that has some already is left to the script that put them there; the proof judges it. Raises
        `NotInForce` where this machine has no FP8, `PolicyError` where no blocks are found for both ends.
        """
        policy = self.plan.policy
        if policy.low_bit_recipe is None or not self.converts:
            return
        if policy.fp8_param:
            why = "converted layers keep exact weights, and quantize them at each forward pass"
            if gathers(policy, self.plan.strategy):
                why = (
                    "under FSDP2 float8 all-gather is put into a model by accelerate alone, and there was no "
                    "Accelerator before this optimizer; make one first"
                )
            self._fail(f"fp8_param: {why}. To go without: mpguard_overrides: {{fp8_param: null}}")
        from mpguard.conversion import choice, swap

        for root in models_of(updated_by(optimizer)):
            modules = [(plain_name(name), module) for name, module in root.named_modules()]
            if swap.has_others(modules, policy) or "" not in choice.reasons(modules, policy).values():
                continue
            for field in swap.not_carried(policy):
                self._fail(
                    f"{field}={policy.text_of(field)}: converted Linear layers have no place for it. "
                    f"To go without: mpguard_overrides: {{{field}: {str(not getattr(policy, field)).lower()}}}"
                )
            try:
                done = swap.convert_named(root, modules, policy)
            except NotInForce as error:
                self._fail(str(error))
                return
            if done.converted and rank() == 0:
                proof.say(f"mpguard: {str(done).splitlines()[0]}")

    # -- steps -------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether a proof is still to come."""
        return self._listening and self.recorder.active

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.failure is not None:
            self.exit_status = 0
            raise NotInForce(self.failure)  # also to a script that has swallowed it once
        self.stepped += 1
        if optimizer in self._proven:
            self.recorder.stop()  # one whole round: every optimizer of the loop has been seen
            return
        if self.plan.enforce == "off":
            return
        if not self.recorder.active:  # one that came later: proven at its next step
            self.recorder = Recorder()
            self.recorder.start(self.plan.policy)
            return
        if not self.recorder.optimizer_stepped(optimizer) or self.engine_depth:
            return  # nothing was there to apply, or the engine says whether it was applied
        if self._overflowed(optimizer):
            self.step_skipped()
            return
        self.step_applied(optimizer)

    def _overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Fused optimizers look for infinities themselves: their step is called and changes nothing."""
        scaler = self.recorder.scaler
        if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        found = scaler._found_inf_per_device(optimizer)
        return any(bool(value.item()) for value in found.values())

    def step_skipped(self) -> None:
        """A step that an overflow took. Raises `NotInForce` beyond the limit."""
        if not self.waiting:
            return
        self.recorder.skipped += 1
        self.check_patience()

    def step_applied(self, optimizer: Any, model: nn.Module | None = None) -> None:
        """Proves an optimizer at its first step that was applied. Raises `NotInForce`."""
        if not self.waiting:
            return
        optimizer = innermost(optimizer)
        if optimizer in self._proven:
            self.recorder.stop()
            return
        with self.recorder.unheard():
            if optimizer in self._alone:
                rows, seen = self._alone[optimizer]
            else:
                self.steps += not self._proven and not self._alone
                seen = observe(
                    self.recorder, model, optimizer,
                    policy=self.plan.policy, step=self.steps + self.recorder.skipped,
                )  # fmt: skip
                rows = proof.compare(seen, self.plan)
            wait = 0.0 if optimizer in self._alone else verdict.ALONE
            if proof.spread_by_nothing(seen) and not verdict.everybody("alone", wait):
                # One rank may train something of its own while the others wait elsewhere.
                self._alone[optimizer] = rows, seen
                return
            self._proven.add(optimizer)
            self._conclude(rows, seen)

    def check_patience(self) -> None:
        """Raises `NotInForce` where the proof has been put off for too long."""
        if not self.waiting or self._proven or self._alone:
            return
        waited = None
        if self.recorder.skipped > SKIPPED_LIMIT:
            waited = f"{self.recorder.skipped} optimizer steps in a row were skipped; the loss scale does not settle"
        elif self.recorder.backwards > BACKWARD_LIMIT:
            waited = f"{self.recorder.backwards} backward passes, and no optimizer step that torch knows of"
        if waited is not None:
            self._conclude((), None, f"not proven: {waited}")

    def rearm(self) -> None:
        """Proves again at the next applied step: a loaded checkpoint can bring other dtypes."""
        if self.proof is None or self.failure is not None:
            return
        self.recorder.stop()
        self.recorder, self.proof, self._again = Recorder(), None, True
        self._proven.clear()
        self._alone.clear()
        if self._listening:
            self.recorder.start(self.plan.policy)

    # -- verdict -----------------------------------------------------------------------------

    def _conclude(self, rows: tuple[Row, ...], seen: Observed | None, message: str = "") -> None:
        """The verdict over all ranks; the table; the file; what `enforce` says."""
        failures = proof.failures(rows, self.plan, seen) if seen else [message]
        everywhere = verdict.agree(next(_verdicts), failures, seen.replicated if seen else None)
        made = Proof(proof.verdict_of(everywhere), self.plan, rows, tuple(everywhere), seen)
        first, self.proof = self.proof is None, made if self.proof is None or everywhere else self.proof
        if everywhere:
            self.recorder.stop()
        if rank() == 0:
            self._report(made, first)
        if everywhere:
            self._fail("; ".join(everywhere))

    def _report(self, made: Proof, first: bool) -> None:
        if made.in_force and made.observed and not first:
            if len(self._proven) <= MENTIONED:
                proof.say(f"step {made.observed.step} of {made.observed.optimizer} proven in force too")
            return
        if self._again and made.in_force:
            proof.say(f"proven in force again, after a checkpoint was loaded · recipe {self.plan.policy.name}")
        elif made.observed is not None:
            proof.say(made.table())
        self._write(made)

    def _write(self, made: Proof | None) -> None:
        """The file for machines; at the beginning its place is tried, and what an earlier run left goes."""
        if rank() != 0 or not self.plan.proof_json:
            return
        try:
            if made is None:
                place = Path(self.plan.proof_json)
                place.touch()
                place.unlink()
            else:
                made.write(self.plan.proof_json)
        except OSError as error:
            raise ConfigError(f"{self.plan.proof_json}: the proof cannot be written: {error.strerror}") from None

    def _fail(self, message: str) -> None:
        if self.plan.enforce == "error":
            self.failure = f"{message}  (--enforce warn to go on anyway)"
            raise NotInForce(self.failure)
        if rank() != 0:
            return
        if message.startswith("not proven"):
            _warn(message)
        else:
            proof.say(f"mpguard: not in force (going on: enforce {self.plan.enforce}): {message}")

    # -- the end -----------------------------------------------------------------------------

    @property
    def trained(self) -> bool:
        """Whether this process has computed gradients and its first proof is still to come."""
        return self.waiting and self.proof is None and bool(self.recorder.backwards or self.recorder.updated)

    def finish(self, status: int = 0) -> int:
        """At the end of the script, with its status: the status that the process should have.

        1 instead of 0 where the run is not in force though the script swallowed the exception, or where
        it trained and ended before it could be proven. A script that never trained is no failure.
        """
        if os.getpid() != self.process:
            return status  # a fork of the script's
        if self._finished:
            return status or int(self.failure is not None)
        self._finished = True
        if self.failure is not None:
            if rank() == 0 and not status:
                proof.say(f"mpguard: {not_in_force(self.failure)}")
            return status or 1
        try:
            self._conclude_late(status)
        except NotInForce as error:
            if rank() == 0:
                proof.say(f"mpguard: {not_in_force(str(error))}")
            return status or 1
        finally:
            self.recorder.stop()
        return status

    def _conclude_late(self, status: int) -> None:
        """The verdict on a run that ends without one. Raises `NotInForce`."""
        if self.proof is not None:
            return
        if self._alone and not status:
            rows, seen = next(iter(self._alone.values()))
            self._conclude(rows, seen)
            return
        trained = self.trained
        reason = "the run computed gradients and ended before an optimizer step was applied"
        if self.plan.enforce == "off":
            reason = "enforce is off"
        elif not trained:
            reason = "no training was seen in this process"
        skipped = f" ({self.recorder.skipped} steps were skipped)" if self.recorder.skipped else ""
        ended = f"; the script ended with status {status}" if status else ""
        message = f"not proven: {reason}{skipped}; what was in force could not be observed{ended}"
        self.proof = Proof("not proven", self.plan, failures=(message,))
        self._write(self.proof)
        if trained or status:
            verdict.tell(next(_verdicts), message)
        if trained and not status:
            self._fail(message)
        elif self.plan.enforce != "off" and not status and rank() == 0 and not self._worker:
            proof.say("mpguard: no training was seen in this process; nothing was proven")

    def _mind_hard_exits(self) -> None:
        """`os._exit` runs no exit handler; a run that is not in force must not end with 0 through it."""
        really = os._exit

        def _exit(status: int) -> None:
            really(self.finish(status) if os.getpid() == self.process else status)

        os._exit = _exit  # type: ignore[assignment]

    def take_over_exit(self) -> None:
        """For processes that mpguard did not start: exceptions without a traceback, and the last word."""
        former, leave = sys.excepthook, sys.exit
        self._worker = multiprocessing.parent_process() is not None

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._crashed = True
            if isinstance(error, NotInForce):
                if verdict.speaks():
                    proof.say(f"mpguard: {not_in_force(str(error))}")
            else:
                former(kind, error, trace)

        def exit(status: Any = None) -> NoReturn:
            self.exit_status = 0 if status is None else status if isinstance(status, int) else 1
            leave(status)

        sys.excepthook, sys.exit = hook, exit
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if self._crashed:
            self.finish(1)
        elif self.finish(self.exit_status) and not self.exit_status and os.getpid() == self.process:
            # An exit handler cannot change the status otherwise; those that are left still run.
            atexit.unregister(self._at_exit)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def not_in_force(message: str) -> str:
    """A failure as it is said; what was not proven says so itself."""
    return message if re.match(r"(rank [\d, ]+: )?not proven", message) else f"not in force: {message}"


def _warn(message: str) -> None:
    """A script that makes errors of warnings does not mean this one."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", NotProven)
        warnings.warn(NotProven(message), stacklevel=3)


def whole_lines() -> None:
    """torchrun starts workers unbuffered, so that lines of several ranks mix in one pipe; here each is one write."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def let_gloo_finish() -> None:
    """Gives gloo's threads the interpreter once more before it ends.

    Such a thread takes the GIL to drop what belongs to a collective. If Python ends meanwhile, it ends
    the thread, and C++ the process: "terminate called without an active exception", SIGABRT, in up to
    one of five runs whose last act is a collective (torch 2.13, CPU, stock accelerate too).
    """
    if "torch.distributed" in sys.modules:
        time.sleep(0.05)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What one target cannot carry another one does; `require_carried` speaks where none does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotCarried)
        yield


def header(plan: Plan) -> str:
    """`mpguard 0.1.0 · recipe bf16_mixed · ddp · 2 processes · no GPU`."""
    from mpguard import __version__

    parts = [f"mpguard {__version__}", f"recipe {plan.policy.name}"]
    if plan.strategy:
        parts.append(plan.strategy)
    if plan.processes:
        parts.append(f"{plan.processes} process{'es' if plan.processes > 1 else ''}")
    return " · ".join([*parts, str(hardware.detect())])


_current: Guard | None = None

#: Verdicts are numbered, and come in the same order on every rank.
_verdicts = itertools.count()


def current() -> Guard | None:
    """The guard of this process; None where nothing was activated."""
    return _current


def start(plan: Plan) -> Guard:
    """Puts a plan in force for everything that is built from here on, and returns its guard.

    A second call with another plan replaces the first one's. Raises `PolicyError`, `NotInForce`.
    """
    global _current  # noqa: PLW0603  one guard per process is the point
    if _current is not None:
        if _current.plan.policy != plan.policy:
            _current.plan = dataclasses.replace(plan, announced=_current.plan.announced)
            _current.rearm()
        return _current
    require_carried("accelerate", plan.policy, plan.strategy)
    _current = Guard(plan)
    _current.begin()
    return _current


def activate(
    policy: Policy | str | None = None, *, enforce: str | None = None, proof_json: str | None = None
) -> Policy:
    """Puts a policy in force for everything that is built from here on, and proves it. Returns the policy.

    policy: a `Policy`, or the name of a recipe; by default the one that the launcher handed over,
    else `[tool.mpguard] recipe` (`ConfigError` where there is none). enforce: "error" (default),
    "warn", "off". proof_json: where the proof is written. Precision that the frameworks are given
    from here on (`Accelerator`, `deepspeed.initialize`, FSDP, GradScaler, TF32) becomes the
    policy's, and each override is logged; after the first applied optimizer step `NotInForce` is
    raised where what runs is something else. Call it before models and optimizers are built.
    """
    if policy is None:
        plan = Plan.found(None, enforce=enforce, proof_json=proof_json) if _current is None else _current.plan
    else:
        policy = recipe(policy) if isinstance(policy, str) else policy
        handed = Plan.from_environment() or Plan(policy, enforce=enforcement(None, Path.cwd()))
        plan = dataclasses.replace(
            handed,
            policy=policy,
            enforce=enforcement(enforce or handed.enforce, Path.cwd()),
            proof_json=proof_json or handed.proof_json,
        )
    fresh = _current is None
    guard = start(plan)
    if fresh:
        guard.take_over_exit()
    return guard.plan.policy


def prove(model: nn.Module, optimizer: Any, policy: Policy | str) -> Proof:
    """Proves here and now, after an optimizer step; returns the proof.

    Compute and reductions are observed from `activate` on; what was not observed is not proven, and in low
    precision that is a failure. With several processes all of them must call it: the verdict is one for
    all. Raises `NotInForce`.
    """
    if isinstance(policy, str):
        policy = recipe(policy)
    plan = Plan(policy)
    recorder = _current.recorder if _current is not None else Recorder()
    with recorder.unheard():
        seen = observe(recorder, model, optimizer, policy=policy)
        rows = proof.compare(seen, plan)
        wrong = verdict.agree(next(_verdicts), proof.failures(rows, plan, seen), seen.replicated)
    made = Proof(proof.verdict_of(wrong), plan, rows, tuple(wrong), seen)
    if wrong:
        raise NotInForce("; ".join(wrong))
    return made
