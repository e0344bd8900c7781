"""Measure the run of this process, if `mpguard sensitivity` has started it, and end it when enough was measured."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpguard.runtime import exit_hooks
from mpguard.runtime import guard as guards
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.observe import updated_by
from mpguard.runtime.ranks import launcher_variable

if TYPE_CHECKING:
    from mpguard.numerics.probe import Probe, ProbeFile

#: Environment variable: what to measure, as JSON, see `environment`.
SENSITIVITY = "MPGUARD_SENSITIVITY"


def environment(folder: Path, policy: str, **settings: Any) -> dict[str, str]:
    """Return the environment variables with which a run is measured.

    folder: each rank writes `rank-N.jsonl` there. policy: the FP8 policy that decides which layers can be FP8, as text.
    settings: see `ProbeSettings`. Compilation is off: compiled code would not call the hooks.
    """
    return {
        SENSITIVITY: json.dumps({"folder": str(folder), "policy": policy, **settings}),
        "TORCHDYNAMO_DISABLE": "1",
    }


@contextlib.contextmanager
def measuring(_plan: Plan) -> Iterator[None]:
    """Measure the block, if this run is to be measured."""
    text = os.environ.get(SENSITIVITY)
    session = _Session(json.loads(text)) if text else None
    try:
        yield
    finally:
        if session is not None:
            session.end()


class _Session:
    """The probe of this process. settings: what `environment` has written."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from mpguard.numerics.probe import CONTAINMENT, Probe, ProbeFile, ProbeSettings
        from mpguard.policy.policy import Policy

        rank, ranks = launcher_variable("RANK", 0), launcher_variable("WORLD_SIZE", 1)
        known = dict(settings)
        folder, policy = Path(known.pop("folder")), Policy.parse(known.pop("policy"))
        self._process = os.getpid()
        self._write: ProbeFile = ProbeFile(folder / f"rank-{rank}.jsonl")
        self._probe: Probe = Probe(ProbeSettings(policy=policy, **known), self._write, rank=rank, ranks=ranks)
        self._began: float | None = None
        self._ended = False
        self._contained = CONTAINMENT.contained
        self._probe.find_layers()
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._ended or os.getpid() != self._process:
            return
        with self._contained("the end of a step"):
            if not self._probe.step_ended(lambda: models_of(updated_by(optimizer))):
                return
            if self._began is None and self._probe.steps >= self._probe.settings.skip:
                self._began = time.perf_counter()
            self._write({"event": "step", "step": self._probe.steps, **self._cost()})  # an interrupted run has no end
        if self._probe.finished:
            self.end()
            guard = guards.current()
            if guard is not None:
                exit_hooks.leave_together(guard)

    def end(self) -> None:
        """Write what measuring has cost, once."""
        if self._ended or os.getpid() != self._process:
            return
        self._ended = True
        with self._contained("the end of the run"):
            self._probe.close()
            self._write({"event": "end", "steps": self._probe.steps, **self._cost()})

    def _cost(self) -> dict[str, float]:
        """Return the seconds that measuring has taken, of those since the first measured step began."""
        total = time.perf_counter() - self._began if self._began is not None else 0.0
        return {"seconds": self._probe.seconds, "total": total}
