"""When a process is proven, and what follows: one `Guard` per process.

After the first optimizer step that is applied, each rank observes and compares; the verdict is
made over all ranks, so that a mismatch on one is raised on all and none waits for ever. Skipped and
accumulated steps only delay it, within a limit. After a checkpoint has been loaded it is made anew.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import io
import itertools
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from mpguard import hardware
from mpguard.errors import NotCarried, NotInForce, NotProven
from mpguard.plugin import Change, require_carried
from mpguard.policy import Policy
from mpguard.recipes import recipe
from mpguard.runtime import imports, proof
from mpguard.runtime.observe import Observed, Recorder, observe, unheard, world_size
from mpguard.runtime.plan import Plan, enforcement
from mpguard.runtime.proof import Proof

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("mpguard")

#: Steps skipped in a row before the run counts as not proven: a dynamic scale from 2**32 with
#: hysteresis 2 needs at most 64 to come down to 1.
SKIPPED_LIMIT = 128

#: Forward passes with gradients and no optimizer step: far beyond any gradient accumulation.
FORWARD_LIMIT = 10_000

#: How long ranks wait for each other's verdict. A rank that ends says so at once.
PATIENCE = datetime.timedelta(minutes=10)


class Guard:
    """Keeps a plan in force in this process. See `activate`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.recorder = Recorder()
        self.proof: Proof | None = None
        self.failure: str | None = None
        self.steps = 0
        self.engine_depth = 0
        self._listening = False
        self._crashed = False
        self._said: set[str] = set()
        self._store: Any = None
        self._again = False

    # -- beginning ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Says the header, where the launcher half has not, and waits for the libraries to come in."""
        from mpguard.runtime import patches

        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            whole_lines()
            atexit.register(let_gloo_finish)
        if not self.plan.announced and rank() == 0:
            proof.say(header(self.plan))
        self.check_start()
        patches.apply()
        imports.after("torch", self._torch_is_here)

    def check_start(self) -> None:
        """What a worker knows before it trains. Raises `NotInForce`."""
        launched, asked = int(os.environ.get("WORLD_SIZE") or 1), self.plan.processes
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
        self.recorder.start()
        self._listening = True

    def say_change(self, where: str, change: Change) -> None:
        """An override, aloud and once: key, old value, new value."""
        text = f"{where}: {change}"
        if text in self._said:
            return
        self._said.add(text)
        log.log(logging.WARNING if rank() == 0 else logging.DEBUG, "%s", text)

    # -- steps -------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the proof is still to come."""
        return self.proof is None and self.plan.enforce != "off" and self._listening

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self.waiting:
            return
        self.recorder.optimizer_stepped(optimizer)
        if self.engine_depth:
            return  # the engine says whether its step was applied
        if not self.recorder.gradients:
            return  # nothing was there to apply
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
        """Proves, at the first step that was applied. Raises `NotInForce`."""
        if not self.waiting:
            return
        self.steps += 1
        with unheard(self.recorder):
            seen = observe(
                self.recorder, model, optimizer,
                policy=self.plan.policy, step=self.steps + self.recorder.skipped,
            )  # fmt: skip
            rows = proof.compare(seen, self.plan)
            self._conclude(rows, seen, proof.failures(rows, self.plan, seen))

    def check_patience(self) -> None:
        """Raises `NotInForce` where the proof has been put off for too long."""
        if not self.waiting:
            return
        waited = None
        if self.recorder.skipped > SKIPPED_LIMIT:
            waited = f"{self.recorder.skipped} optimizer steps in a row were skipped; the loss scale does not settle"
        elif self.recorder.forwards > FORWARD_LIMIT and self.recorder.backward:
            waited = f"{self.recorder.forwards} forward passes, and no optimizer step that torch knows of"
        if waited is not None:
            self._conclude((), None, [f"not proven: {waited}"])

    def rearm(self) -> None:
        """Proves again at the next applied step: a loaded checkpoint can bring other dtypes."""
        if self.proof is None or self.failure is not None:
            return
        self.recorder.stop()
        self.recorder, self.proof, self._again = Recorder(), None, True
        if self._listening:
            self.recorder.start()

    # -- verdict -----------------------------------------------------------------------------

    def _conclude(self, rows: tuple[proof.Row, ...], seen: Observed | None, failures: list[str]) -> None:
        """The verdict over all ranks; the table; the file; what `enforce` says."""
        everywhere = self._agree(failures)
        verdict = "in force" if not everywhere else "not proven" if seen is None else "not in force"
        self.proof = Proof(verdict, self.plan, rows, tuple(everywhere), seen)
        self.recorder.stop()
        self._store = None
        if rank() == 0:
            self._report(self.proof)
        if everywhere:
            self._fail("; ".join(everywhere))

    def _report(self, made: Proof) -> None:
        if self._again and made.in_force:
            proof.say(f"proven in force again, after a checkpoint was loaded · recipe {self.plan.policy.name}")
        elif made.observed is not None:
            proof.say(made.table())
        if self.plan.proof_json:
            made.write(self.plan.proof_json)

    def _fail(self, message: str) -> None:
        if self.plan.enforce == "error":
            self.failure = message
            raise NotInForce(f"{message}  (--enforce warn to go on anyway)")
        if rank() != 0:
            return
        if message.startswith("not proven"):
            warnings.warn(NotProven(message), stacklevel=2)
        else:
            proof.say(f"mpguard: not in force (going on: enforce {self.plan.enforce}): {message}")

    def _agree(self, failures: list[str]) -> list[str]:
        """The failures of all ranks, on all ranks. Rank 0 collects; the others wait for it.

        Through the process group's store, not a collective: it needs no device, and a rank that
        has ended, or sits in another collective, is named after `PATIENCE` instead of waited for.
        """
        size, _launched = world_size()
        if size == 1:
            return failures
        store, me, turn = self._the_store(), rank(), next(_verdicts)
        if store is None:
            return _gathered(failures, size)
        store.set(f"mpguard/{turn}/{me}", json.dumps(failures))
        if me != 0:
            try:
                store.wait([f"mpguard/{turn}/verdict"], PATIENCE)
            except Exception as error:
                return [*failures, f"rank 0 gave no verdict within {PATIENCE}: {error}"]
            return list(json.loads(store.get(f"mpguard/{turn}/verdict")))
        collected: dict[str, list[int]] = {}
        for other in range(size):
            try:
                store.wait([f"mpguard/{turn}/{other}"], PATIENCE)
                found = json.loads(store.get(f"mpguard/{turn}/{other}"))
            except Exception as error:
                found = [f"gave no verdict within {PATIENCE}: {error}"]
            for failure in found:
                collected.setdefault(failure, []).append(other)
        everywhere = [
            text if len(ranks) == size else f"rank {_ranks(ranks)}: {text}" for text, ranks in collected.items()
        ]
        store.set(f"mpguard/{turn}/verdict", json.dumps(everywhere))
        return everywhere

    def _the_store(self) -> Any:
        from torch.distributed import distributed_c10d

        if self._store is None:
            with contextlib.suppress(Exception):
                self._store = distributed_c10d._get_default_store()
        return self._store

    # -- the end -----------------------------------------------------------------------------

    @property
    def trained(self) -> bool:
        """Whether this process has computed gradients and the proof is still to come."""
        return self.waiting and (self.recorder.backward or bool(self.recorder.gradients))

    def finish(self) -> int:
        """At the end of the script: the status that the guard asks for, 0 or 1.

        1 where the run is not in force though the script swallowed the exception, or where it
        trained and ended before it could be proven. A script that never trained is no failure.
        """
        if self.failure is not None:
            return 1
        if not self.trained:
            return 0
        skipped = f" ({self.recorder.skipped} steps were skipped)" if self.recorder.skipped else ""
        message = (
            "not proven: the run computed gradients and ended before an optimizer step was applied"
            f"{skipped}; what was in force could not be observed"
        )
        self.proof = Proof("not proven", self.plan, failures=(message,))
        self._tell_the_others(message)
        self.recorder.stop()
        if rank() == 0:
            self._report(self.proof)
        if self.plan.enforce == "warn":
            warnings.warn(NotProven(message), stacklevel=2)
            return 0
        self.failure = message
        if rank() == 0:
            proof.say(f"mpguard: {message}")
        return 1

    def _tell_the_others(self, message: str) -> None:
        """Ranks that wait for this one's verdict must not wait long."""
        with contextlib.suppress(Exception):
            store = self._the_store()
            if store is not None and world_size()[0] > 1:
                turn = next(_verdicts)
                store.set(f"mpguard/{turn}/{rank()}", json.dumps([message]))
                if rank() == 0:
                    store.set(f"mpguard/{turn}/verdict", json.dumps([f"rank 0: {message}"]))

    def take_over_exit(self) -> None:
        """For processes that mpguard did not start: exceptions without a traceback, and the last word."""
        former = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._crashed = True
            if isinstance(error, NotInForce):
                if rank() == 0:
                    proof.say(f"mpguard: not in force: {error}")
            else:
                former(kind, error, trace)

        sys.excepthook = hook
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if self._crashed or not self.finish():
            return
        # An exit handler cannot change the status otherwise; those that are left still run.
        atexit.unregister(self._at_exit)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _gathered(failures: list[str], size: int) -> list[str]:
    """The same over a collective, for process groups without a store (MPI)."""
    import torch.distributed as dist

    found: list[Any] = [None] * size
    dist.all_gather_object(found, failures)
    return list(dict.fromkeys(f"rank {index}: {text}" for index, texts in enumerate(found) for text in texts))


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


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


def rank() -> int:
    """This process among all, as its launcher numbers them; 0 alone."""
    return int(os.environ.get("RANK") or 0)


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
    from pathlib import Path

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

    Activations and reductions are known where `activate` came before the step, and "not observed"
    otherwise. With several processes all of them must call it: the verdict is one for all. Raises
    `NotInForce`.
    """
    if isinstance(policy, str):
        policy = recipe(policy)
    plan = Plan(policy)
    guard = _current if _current is not None and _current.waiting else Guard(plan)
    with unheard(guard.recorder):
        seen = observe(guard.recorder, model, optimizer, policy=policy)
        rows = proof.compare(seen, plan)
        wrong = guard._agree(proof.failures(rows, plan, seen))
    made = Proof("not in force" if wrong else "in force", plan, rows, tuple(wrong), seen)
    if wrong:
        raise NotInForce("; ".join(wrong))
    return made
