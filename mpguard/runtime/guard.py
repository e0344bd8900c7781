"""When a process is proven, and what follows: one `Guard` per process.

After the first step that is applied of each optimizer, each rank observes and compares; the verdict
is made over all ranks, so that a mismatch on one is raised on all and none waits for ever. Skipped and
accumulated steps only delay it, within a limit. After a checkpoint has been loaded it is made anew.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpguard.core.console import print_line
from mpguard.core.errors import ConfigError, NotInForce
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import given
from mpguard.runtime.messages import warn_not_proven
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import compare, consensus
from mpguard.runtime.proof.compare import Proof, Row
from mpguard.runtime.proof.consensus import rank
from mpguard.runtime.proof.observe import Observed, innermost, observe
from mpguard.runtime.proof.recorder import Recorder
from mpguard.targets.inject import Change

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
        self.finished = False
        self.spawned = False  # by the script, maybe to load data: that it does not train is not worth a word
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.converts = self.compiles = True  # accelerate does so where there is an Accelerator
        self._listening = False
        self._said: set[str] = set()
        self._before: Proof | None = None  # the proof that a loaded checkpoint has put in question
        self._proven: weakref.WeakSet[Any] = weakref.WeakSet()
        self._alone: weakref.WeakKeyDictionary[Any, tuple[tuple[Row, ...], Observed]] = weakref.WeakKeyDictionary()

    def listen(self) -> None:
        """Hears what optimizers and the recorder hear, from here on. Needs torch."""
        if self.plan.enforce == "off" or self._listening:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._optimizer_stepped)
        self.recorder.start(self.plan.policy)
        self._listening = True

    # -- saying ------------------------------------------------------------------------------

    def report(self, text: str) -> None:
        """A line of rank 0's, once."""
        if text not in self._said and rank() == 0:
            self._said.add(text)
            print_line(text)

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
        """Whether a proof is still to come."""
        return self._listening and self.recorder.active

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.stepped += 1
        if self.failure is not None:
            raise NotInForce(self.failure)  # also to a script that has swallowed it once
        if optimizer in self._proven:
            self.recorder.stop()  # one whole round: every optimizer of the loop has been seen
            return
        if self.plan.enforce == "off":
            return
        if not self.recorder.active:  # one that came later: proven at its next step
            self.recorder = Recorder(self.recorder)
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
        self.check_limits()

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
                rows = compare.compare(seen, self.plan)
            wait = 0.0 if optimizer in self._alone else consensus.ALONE
            if compare.spread_by_nothing(seen) and not consensus.all_ranks_reached("alone", wait):
                # One rank may train something of its own while the others wait elsewhere.
                self._alone[optimizer] = rows, seen
                return
            self._proven.add(optimizer)
            self._conclude(rows, seen)

    def check_limits(self) -> None:
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
        self.recorder, self._before, self.proof = Recorder(self.recorder), self.proof, None
        self._proven.clear()
        self._alone.clear()
        if self._listening:
            self.recorder.start(self.plan.policy)

    # -- verdict -----------------------------------------------------------------------------

    def _conclude(self, rows: tuple[Row, ...], seen: Observed | None, message: str = "") -> None:
        """The verdict over all ranks; the table; the file; what `enforce` says."""
        failures = compare.failures(rows, self.plan, seen) if seen else [message]
        everywhere = consensus.agree_on_failures(next(_verdicts), failures, seen.replicated if seen else None)
        made = Proof(compare.verdict_of(everywhere), self.plan, rows, tuple(everywhere), seen)
        first, self.proof = self.proof is None, made if self.proof is None or everywhere else self.proof
        if everywhere:
            self.recorder.stop()
        if rank() == 0:
            self._report(made, first)
        if everywhere:
            self.fail("; ".join(everywhere))

    def _report(self, made: Proof, first: bool) -> None:
        if made.in_force and made.observed and not first:
            if len(self._proven) <= MENTIONED:
                print_line(f"step {made.observed.step} of {made.observed.optimizer} proven in force too")
            return
        if self._before is not None and made.in_force:
            print_line(f"proven in force again, after a checkpoint was loaded · recipe {self.plan.policy.name}")
        elif made.observed is not None:
            print_line(made.table())
        self.write_proof(made)

    def write_proof(self, made: Proof | None) -> None:
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

    def fail(self, message: str) -> None:
        if self.plan.enforce == "error":
            self.failure = f"{message}  (--enforce warn to go on anyway)"
            raise NotInForce(self.failure)
        if rank() != 0:
            return
        if message.startswith("not proven"):
            warn_not_proven(message)
        else:
            print_line(f"mpguard: not in force (going on: enforce {self.plan.enforce}): {message}")

    # -- the end -----------------------------------------------------------------------------

    @property
    def trained(self) -> bool:
        """Whether this process has computed gradients and its first proof is still to come."""
        return self.waiting and self.proof is None and bool(self.recorder.backwards or self.recorder.updated)

    def finalize(self, status: int) -> None:
        """The verdict on a run that ends without one. Raises `NotInForce`."""
        if self.proof is not None:
            return
        if self._before is not None and not self.trained and not self._alone:
            self.proof = self._before  # a checkpoint was loaded to be looked at, not to go on
            return
        if self._alone and not status:
            rows, seen = next(iter(self._alone.values()))
            self._conclude(rows, seen)
            return
        trained = self.trained
        reason = "the run computed gradients and ended before an optimizer step was applied"
        if self.stepped and not self.recorder.updated:
            reason = (
                "an optimizer was stepped, and no parameter of its had a gradient: they are not those of the model "
                "that was trained. Make it after what replaces parameters (fully_shard, FSDP, a copy, a new layer)"
            )
        if self.plan.enforce == "off":
            reason = "enforce is off"
        elif not trained:
            reason = "no training was seen in this process"
        skipped = f" ({self.recorder.skipped} steps were skipped)" if self.recorder.skipped else ""
        ended = f"; the script ended with status {status}" if status else ""
        message = f"not proven: {reason}{skipped}; what was in force could not be observed{ended}"
        self.proof = Proof("not proven", self.plan, failures=(message,))
        self.write_proof(self.proof)
        if trained or status:
            consensus.publish_failure(next(_verdicts), message)
        if trained and not status:
            self.fail(message)
        elif self.plan.enforce != "off" and not status and rank() == 0 and not self.spawned:
            print_line(
                "mpguard: no training was seen in this process; nothing was proven. Processes that a script starts "
                "itself are proven where each of them imports mpguard.auto"
            )


_current: Guard | None = None

#: Verdicts are numbered, and come in the same order on every rank.
_verdicts = itertools.count()


def current() -> Guard | None:
    """The guard of this process; None where nothing was activated."""
    return _current


def set_current(guard: Guard) -> None:
    """Makes a guard that of this process."""
    global _current  # noqa: PLW0603  one guard per process is the point
    _current = guard


def prove(model: nn.Module, optimizer: Any, policy: Policy | str) -> Proof:
    """Proves here and now, after an optimizer step; returns the proof.

    Compute and reductions are observed from `activate` on; what was not observed is not proven, and in low
    precision that is a failure. With several processes all of them must call it: the verdict is one for
    all. Raises `NotInForce`.
    """
    policy = given(policy, "prove")
    plan = Plan(policy)
    recorder = _current.recorder if _current is not None else Recorder()
    with recorder.unheard():
        seen = observe(recorder, model, optimizer, policy=policy)
        rows = compare.compare(seen, plan)
        wrong = consensus.agree_on_failures(next(_verdicts), compare.failures(rows, plan, seen), seen.replicated)
    made = Proof(compare.verdict_of(wrong), plan, rows, tuple(wrong), seen)
    if wrong:
        raise NotInForce("; ".join(wrong))
    return made
