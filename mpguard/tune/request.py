"""`tune`: check a command line, measure the candidates for it, and return the report."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mpguard.core.errors import ConfigError, NotInForce, PolicyError, did_you_mean
from mpguard.document import mp_yaml, read
from mpguard.runtime.launch import launcher
from mpguard.targets.capabilities import slower_demand
from mpguard.tune.candidates import CONFIGURED, TABLE, TuneCandidate, candidates
from mpguard.tune.model import TuneReport, TuneRow
from mpguard.tune.search import search
from mpguard.tune.trial import Trials


@dataclasses.dataclass(frozen=True)
class TuneRequest:
    """What to tune, and how.

    config: the mp.yaml. argv: the command line of `mpguard launch`, with `--config`. arguments: how many of its last
    words are the script's. warmup, steps: optimizer steps that are dropped, and timed, in each trial. limit: seconds
    that a trial may take. budget: seconds after which none begins; None without an end. only: names of candidates;
    empty for all.
    """

    config: Path
    argv: Sequence[str]
    arguments: int
    warmup: int = 10
    steps: int = 20
    rounds: int = 3
    limit: float = 900.0
    only: Sequence[str] = ()
    exhaustive: bool = False
    budget: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("warmup", self.warmup, 3), ("steps", self.steps, 3), ("rounds", self.rounds, 1)):
            if value < least:
                raise ConfigError(f"--{name} {value}: {least} or more is needed")
        if self.limit <= 0:
            raise ConfigError(f"--time-limit {self.limit:g}: a number of seconds above 0 is needed")
        if self.budget is not None and self.budget <= 0:
            raise ConfigError(f"--budget {self.budget:g}: a number of seconds above 0 is needed")
        known = [CONFIGURED, *(variant.name for variant in TABLE)]
        for name in self.only:
            if name not in known:
                raise ConfigError(f"--only {name}: there is no such candidate{did_you_mean(name, known)}")


def plan(request: TuneRequest) -> list[TuneCandidate]:
    """Return the candidates, each with the reason if it cannot run here. Raises an `MpguardError` if none could."""
    from accelerate.commands.launch import launch_command_parser

    machines = read(request.config).require().get("num_machines")
    if isinstance(machines, int) and machines > 1:
        raise ConfigError(
            f"{read(request.config).where('num_machines')}: is {machines}; tune starts and ends the processes of "
            "one machine. Tune with the processes of one machine"
        )
    return [each if each.refused else _prepared(request, each, launch_command_parser) for each in _selected(request)]


def _selected(request: TuneRequest) -> Iterator[TuneCandidate]:
    """Yield the candidates that were asked for, and always the first one in BF16."""
    needed = False
    found = list(candidates(mp_yaml.load_policy(request.config)))
    names = {each.name for each in found}
    only = {name if name in names else CONFIGURED for name in request.only}  # a policy that the config has already
    for each in found:
        is_first = not needed and each.is_baseline and each.policy is not None and each.policy.compile is True
        needed |= is_first
        if is_first or not only or each.name in only:
            yield each


def _prepared(request: TuneRequest, candidate: TuneCandidate, parser_factory: launcher.ParserFactory) -> TuneCandidate:
    """Return a candidate with the reason if it cannot be launched, and with what its demands cost if it can.

    Raises if no launch of this config can start.
    """
    try:
        prepared = launcher.prepare(["--enforce", "error", *request.argv], parser_factory, candidate.overrides)
    except NotInForce as error:
        name = candidate.policy.name if candidate.policy is not None else ""
        refused = error.reasons.replace(f"the policy `{name}` does not run here: ", "")  # one for many candidates
        return dataclasses.replace(candidate, refused=refused)
    except PolicyError as error:
        return dataclasses.replace(candidate, refused=str(error))
    plan = prepared.plan if prepared is not None else None
    cost = slower_demand(plan.policy, plan.strategy, plan.processes) if plan is not None else None
    return dataclasses.replace(candidate, cost=f"fp8_param: true costs time: {cost}" if cost is not None else "")


def tune(
    request: TuneRequest, chosen: Sequence[TuneCandidate], folder: Path, on_change: Callable[[TuneReport], None]
) -> TuneReport:
    """Measure candidates, and return the report; after Ctrl-C the report of what was measured by then.

    folder: of all trials. on_change: is called when something is known.
    """
    report = TuneReport([TuneRow(each) for each in chosen], on_change=on_change)
    trials = Trials(
        folder, request.argv, request.arguments, warmup=request.warmup, steps=request.steps, limit=request.limit
    )
    end = math.inf if request.budget is None else time.monotonic() + request.budget
    try:
        search(
            report,
            trials.measure,
            request.rounds,
            exhaustive=request.exhaustive,
            is_over=lambda: time.monotonic() >= end,
        )
    except KeyboardInterrupt:
        report.interrupted = True
        for row in report.rows:
            if not row.trials and not row.reason:
                row.note = "interrupted"
    return report
