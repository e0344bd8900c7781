"""Start a script to measure its layers, follow it, and try the proposal in the same script."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpguard.core.errors import ConfigError, NotInForce, PolicyError, did_you_mean
from mpguard.document import mp_yaml, read
from mpguard.nn.format_names import FORMAT_OF, LABELS, default_bound
from mpguard.numerics import session
from mpguard.numerics.proposal import FINER, Proposal
from mpguard.numerics.report import Sensitivity, gathered, read_lines
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.runtime.launch import launcher
from mpguard.tune import trial
from mpguard.tune.candidates import TuneCandidate
from mpguard.tune.model import TrialResult

#: The steps of a proposal that is tried: the first is proven.
TRIED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class SensitivityRequest:
    """What to measure, and how.

    config: the mp.yaml. argv: the command line of `mpguard launch`, with `--config`. arguments: how many of its last
    words are the script's. steps, skip, every: see `ProbeSettings`. formats: None for all. recipe: the FP8 recipe that
    layers are sorted by; None for that of the config, tensorwise if it has none. bound: in dB; None for the default.
    limit: seconds that a run may take.
    """

    config: Path
    argv: Sequence[str]
    arguments: int
    steps: int = 20
    skip: int = 1
    every: int = 4
    formats: Sequence[str] | None = None
    recipe: str | None = None
    bound: float | None = None
    limit: float = 900.0

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("skip", self.skip), ("every", self.every)):
            if value < 1:
                raise ConfigError(f"--{name} {value}: 1 or more is needed")
        for name in self.formats or ():
            if name not in LABELS:
                raise ConfigError(f"--only {name}: there is no such format{did_you_mean(name, LABELS)}")
        recipes = [each for each in FORMAT_OF if each not in ("none", "bf16")]
        if self.recipe is not None and self.recipe not in recipes:
            raise ConfigError(f"--recipe {self.recipe}: there is no such recipe{did_you_mean(self.recipe, recipes)}")
        if self.bound is not None and not math.isfinite(self.bound):
            raise ConfigError(f"--bound {self.bound}: a number of dB is needed")
        if self.limit <= 0:
            raise ConfigError(f"--time-limit {self.limit:g}: a number of seconds above 0 is needed")


@dataclasses.dataclass(frozen=True)
class SensitivityPlan:
    """What a request means for its config.

    configured: the policy of the config. policy: with FP8, by which layers are chosen and sorted. recipe: of it.
    formats: that are measured. overrides: fields of the policy that differ in the run that is measured, which has no
    FP8. finer: recipes that a layer may get instead.
    """

    configured: Policy
    policy: Policy
    recipe: str
    formats: tuple[str, ...]
    overrides: Mapping[str, Any]
    finer: tuple[str, ...]
    bound: float

    @property
    def is_configured(self) -> bool:
        """True if the recipe is that of the config, so that a proposal fits it."""
        return self.configured.low_bit_recipe == self.recipe


def plan(request: SensitivityRequest) -> SensitivityPlan:
    """Return what a request means for its config. Raises an `MpguardError` if the script could not be started."""
    from accelerate.commands.launch import launch_command_parser

    document = read(request.config)
    machines = document.require().get("num_machines")
    if isinstance(machines, int) and machines > 1:
        raise ConfigError(
            f"{document.where('num_machines')}: is {machines}; sensitivity starts and ends the processes of one "
            "machine. Measure with the processes of one machine"
        )
    configured = mp_yaml.load_policy(request.config)
    recipe = request.recipe or configured.low_bit_recipe or "tensorwise"
    policy = _with_recipe(configured, recipe)
    finer = tuple(each for each in FINER.get(recipe, ()) if _is_torchao(policy) and _accepts(policy, each))
    needed = {form for name in (recipe, *finer, "none") for form in FORMAT_OF[name]}
    chosen = [name for name in LABELS if request.formats is None or name in request.formats or name in needed]
    compute = {} if configured.low_precision else {"bf16": True}
    fields = {**compute, "fp8": None, "fp4": None, "fp8_modules": (), "compile": False}
    overrides = {name: value for name, value in fields.items() if getattr(configured, name) != value}
    if launcher.prepare(["--enforce", "error", *request.argv], launch_command_parser, overrides) is None:
        raise ConfigError("no --config is given; the command is mpguard sensitivity --config mp.yaml SCRIPT")
    bound = default_bound(recipe) if request.bound is None else request.bound
    return SensitivityPlan(configured, policy, recipe, tuple(chosen), overrides, finer, bound)


def _with_recipe(configured: Policy, recipe: str) -> Policy:
    """Return a policy with an FP8 recipe, which need not run here: it decides which layers can be FP8."""
    if configured.low_bit_recipe == recipe:
        return configured
    compute = {} if configured.low_precision else {"bf16": True}
    low = (
        {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8": None}
        if recipe == "nvfp4"
        else {"fp4": None, "fp8_recipe": recipe}
    )
    for form in ("hybrid", "e4m3"):
        try:
            return configured.replace(**compute, **low, **({} if recipe == "nvfp4" else {"fp8": form}))
        except PolicyError as error:
            reason = error
    raise PolicyError(f"--recipe {recipe}: {reason}")


def _is_torchao(policy: Policy) -> bool:
    """True if torchao converts the layers: Transformer Engine has no second recipe of the same kind."""
    return hardware.backend_of(policy.decided(), hardware.detect()) == "torchao"


def _accepts(policy: Policy, recipe: str) -> bool:
    """True if a policy may have layers with another recipe."""
    try:
        policy.replace(fp8_modules=[{"pattern": "*", "recipe": recipe}])
    except PolicyError:
        return False
    return True


def measure(
    request: SensitivityRequest, chosen: SensitivityPlan, folder: Path, on_step: Callable[[int, int], None]
) -> Sensitivity:
    """Run the script until enough was measured, and return the report; after Ctrl-C that of what was measured by then.

    folder: for the numbers and the output of the script. on_step: gets the steps that have ended, and how many will.
    Raises `ConfigError` if nothing was measured.
    """
    (folder / "out").mkdir(parents=True, exist_ok=True)
    last = request.skip + request.steps
    settings = session.environment(
        folder, str(chosen.policy), formats=chosen.formats, steps=request.steps, skip=request.skip, every=request.every
    )
    interrupted, status = False, None
    try:
        status = _start(request, chosen.overrides, settings, folder, lambda: on_step(_steps(folder), last))
    except KeyboardInterrupt:
        interrupted = True
    report = gathered(read_lines(folder), chosen.recipe, chosen.formats)
    report.interrupted = interrupted
    if report.measured and status != 0 and not interrupted:
        report.failure = _why(folder, status, request, report)
    if not report.measured and not interrupted:
        raise NotMeasured(_why(folder, status, request, report))
    return report


class NotMeasured(ConfigError):
    """A run has ended before any layer was measured."""


def _start(
    request: SensitivityRequest,
    overrides: Mapping[str, Any],
    settings: Mapping[str, str],
    folder: Path,
    on_wait: Callable[[], None],
) -> int | None:
    count = request.arguments
    head, arguments = request.argv[: len(request.argv) - count], request.argv[len(request.argv) - count :]
    out = str(folder / "out")
    command = [
        sys.executable, "-m", "mpguard.tune.start", json.dumps(overrides, default=list), "--enforce", "off",
        "--watch", "off", *head, *(each.replace(trial.PLACEHOLDER, out) for each in arguments),
    ]  # fmt: skip
    environment = {**os.environ, trial.OUT: out, **settings}
    with tempfile.TemporaryDirectory(prefix="mpguard-", ignore_cleanup_errors=True) as temporary:
        return trial.run_processes(
            command, {**environment, "TMPDIR": temporary}, folder / "log.txt", request.limit, on_wait
        )


def _steps(folder: Path) -> int:
    """Return how many steps of rank 0 have ended."""
    path = folder / "rank-0.jsonl"
    return path.read_text(encoding="utf-8").count('"event": "step"') if path.exists() else 0


def _why(folder: Path, status: int | None, request: SensitivityRequest, report: Sensitivity) -> str:
    """Return why nothing was measured, or not all steps."""
    text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    own = [line for line in text.splitlines() if line.startswith("mpguard: ")]
    if status is None:
        ended = f"ended after {request.limit:g} s (--time-limit)"
        return ended if report.measured else f"{ended}, and no layer was measured"
    if status:
        return own[-1].removeprefix("mpguard: ") if own else trial.error_of(trial.lines_of_script(text), status)
    if report.layers:
        reasons = dict.fromkeys(layer.unmeasured for layer in report.layers if layer.unmeasured)
        if reasons:
            return f"no Linear layer can be measured: {'; '.join(reasons)}"
        return (
            f"the script ended after {_steps(folder)} optimizer steps; {request.skip + 1} or more are needed: the "
            f"first {request.skip} are not measured"
        )
    return "the script ended without an optimizer step after a backward pass through a Linear layer"


# -- the proposal ------------------------------------------------------------------------------------------------------


def candidate_of(proposal: Proposal, chosen: SensitivityPlan) -> TuneCandidate:
    """Return the policy of the config with a proposal. Raises `PolicyError` if it cannot be."""
    fields = {"fp8_modules": [dict(each) for each in proposal.modules]}
    return TuneCandidate("proposal", fields, chosen.configured.replace(**fields))


def tried(request: SensitivityRequest, candidate: TuneCandidate, folder: Path) -> TrialResult:
    """Run the script with a proposal for a few steps, of which the first is proven, and return the result.

    Without a GPU the formats of torchao are computed in software.
    """
    assert candidate.policy is not None  # `candidate_of` has made it
    if not launcher.has_accelerator():
        try:
            candidate.policy.emulated()
        except (PolicyError, NotInForce) as error:
            return TrialResult("refused", str(error))
        head = len(request.argv) - request.arguments - 1
        argv = [*request.argv[:head], launcher.EMULATE, *request.argv[head:]]
    else:
        argv = list(request.argv)
    runs = trial.Trials(folder, argv, request.arguments, warmup=3, steps=TRIED_STEPS, limit=request.limit)
    return runs.measure(candidate, 1)
