"""Put the parts together: from the inputs of a run to its explanation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpguard.core.errors import MpguardError, PolicyError
from mpguard.document import Document, mp_yaml, validation
from mpguard.document.schemas.deepspeed import other_optimizer
from mpguard.explain import accelerate, deepspeed, launch, policy
from mpguard.explain.inputs import RunInputs
from mpguard.explain.model import Explanation, Resolved
from mpguard.explain.unread import RunFacts, unread
from mpguard.nn import compile as compilation
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.runtime.launch import preflight
from mpguard.runtime.plan import Plan
from mpguard.targets.capabilities import require_supported
from mpguard.targets.inject import differences
from mpguard.targets.settings import Setting, merged


def explain(run: RunInputs, machine: hardware.Hardware | None = None) -> Explanation:
    """Return the explanation of a run. machine: the GPU that it runs on; None: one that can run every mode.

    Raises `ConfigError` and `PolicyError` for inputs that cannot be used.
    """
    refused = list(_invalid(run))
    try:
        return _explain(run, machine, refused)
    except MpguardError:
        if not refused or run.config is None:
            raise
        return Explanation(_title(run, "NO", None, False), (), stops=tuple(refused))


def _explain(run: RunInputs, machine: hardware.Hardware | None, refused: list[str]) -> Explanation:
    """Return the explanation. refused: what a launch refuses in the config, which may make the rest unreadable."""
    if run.config is not None and any(validation.own_problems(run.config)):
        run = dataclasses.replace(run, launcher="accelerate", stock=True)  # there is no policy to read
    engine, notes = launch.engine(run), [*run.notes, *_notes(run)]
    mode = accelerate.mode(run, machine)
    document = deepspeed.document_of(run)[0]
    direct = deepspeed.direct(run)
    of_engine = list(deepspeed.settings(run, mode)) if engine == "DEEPSPEED" or (direct and document) else []
    in_force = policy.policy_of(run)
    notes = [*run.notes, *_notes(run)]
    if document is not None and of_engine:
        notes += [each.message(document) for each in validation.undecided(document)]
    if in_force is None:
        enforced: list[Resolved] = []
        settings = list(_stock(run, engine, mode, of_engine, str(mode.value)))
        stops = [*accelerate.stops(run, mode), *deepspeed.stops(run, mode, of_engine)]
    else:
        config = (document.data if document is not None else {}) if of_engine else None
        strategy, processes = policy.strategy_of(run, config), policy.processes_of(run)
        enforced = [*policy.fields(in_force), *policy.enforced(in_force, strategy, config, processes)]
        notes += policy.speed_notes(in_force.policy, strategy, processes)
        settings = _under_policy(run, engine, mode, of_engine, enforced)
        if policy.converts_models(in_force.policy, strategy, processes) or in_force.policy.low_bit_recipe is None:
            settings = [each for each in settings if not each.key.startswith("fp8_config.")]
        notes += _other_optimizer(of_engine, settings, config, strategy)
        stops = list(_refused(run, in_force.policy, engine, strategy))
        in_use = next(each for each in settings if each.key == "mixed_precision")
        stops = stops or list(deepspeed.stops(run, in_use, of_engine, guarded=True))
        stops += deepspeed.wrong_keys(run, document, True) if document is not None and of_engine else ()
    stops += _misspelled(run)
    values = _values(settings)
    in_force_mode = str(values.get("mixed_precision", "no"))
    facts = RunFacts(
        engine=engine,
        launched=in_force_mode if in_force is not None else str(launch.launched_mode(run).value),
        mode=in_force_mode,
        backend=str(values["fp8_config.backend"]) if "fp8_config.backend" in values else None,
        enforced=frozenset(_values(enforced)),
        guarded=in_force is not None,
    )
    return Explanation(
        title=_title(run, engine, document, in_force is not None),
        settings=tuple(settings),
        unread=tuple(unread(run, facts, document, direct)),
        stops=tuple(dict.fromkeys([*refused, *launch.stops(run, guarded=in_force is not None), *stops])),
        notes=tuple(notes),
    )


def _other_optimizer(
    stock: list[Resolved], policy: list[Resolved], config: Mapping[str, Any] | None, strategy: str | None
) -> Iterator[str]:
    """Yield the line of another optimizer class that DeepSpeed builds because of the policy's settings."""
    if config is None or not (strategy or "").startswith("deepspeed-zero"):
        return
    zero = config.get("zero_optimization") or {"stage": int(str(strategy)[-1])}
    before, after = (
        merged({"zero_optimization": zero}, {each.key: Setting(each.value) for each in settings if "." in each.key})
        for settings in (stock, [each for each in policy if each.key.partition(".")[0] in _OF_ENGINE])
    )
    if line := other_optimizer(before, after):
        yield line


#: The sections of DeepSpeed's config that select the class of its optimizer.
_OF_ENGINE = ("bf16", "fp16", "data_types")


def _invalid(run: RunInputs) -> Iterator[str]:
    """Yield what `mpguard launch` refuses in the config, by the same validator: keys and values."""
    if run.config is None or not run.launches:
        return
    replaced = {*run.flags, *(("mixed_precision",) if run.launcher == "mpguard" else ())}  # by flags, and the policy
    for problem in validation.accelerate_problems(run.config):
        if not problem.is_removed_by(replaced) and not problem.undecided:
            yield problem.message(run.config)
    yield from (problem.message(run.config) for problem in validation.own_problems(run.config))


def _misspelled(run: RunInputs) -> Iterator[str]:
    """Yield the arguments about precision that `TrainingArguments`, or a config of TRL, does not have."""
    for each in run.script.misspelled if run.script is not None else ():
        yield (
            f"{each.origin}: there is no argument `{each.value}`; the script stops with TypeError. Did you mean "
            f"`{each.name}`?"
        )


def _notes(run: RunInputs) -> Iterator[str]:
    """Yield what the reader should know about a run without a policy."""
    if run.config is not None and run.launches:
        yield from (each.message(run.config) for each in validation.undecided(run.config))
    if run.launcher == "mpguard":
        return
    yield from launch.config_after_script(run)
    if run.script is not None and run.launches and not run.script.uses_accelerate:
        yield (
            f"{run.script.path} creates no `Accelerator` and no `TrainingArguments`: what accelerate would set is left "
            "out"
        )


def _under_policy(
    run: RunInputs, engine: str, mode: Resolved, of_engine: list[Resolved], enforced: list[Resolved]
) -> list[Resolved]:
    """Return the settings under a policy: its own, each with what it replaces, and those that it leaves alone."""
    wanted = _values(enforced)
    if of_engine:
        of_engine = _with_sections(of_engine, list(deepspeed.settings(run, mode, wanted)))
    stock = list(_stock(run, engine, mode, of_engine, str(wanted["mixed_precision"])))
    return list(policy.overlay(stock, enforced))


def _values(settings: list[Resolved]) -> dict[str, Any]:
    return {each.key: each.value for each in settings}


def _with_sections(stock: list[Resolved], policy: list[Resolved]) -> list[Resolved]:
    """Return the engine's settings with the keys of the sections that are on under the policy."""
    return [each for each in policy if not each.key.startswith("torch_autocast.")] + [
        each for each in stock if each.key not in _values(policy)
    ]


def _stock(run: RunInputs, engine: str, mode: Resolved, of_engine: list[Resolved], in_use: str) -> Iterator[Resolved]:
    """Yield the settings that the frameworks have without a policy. in_use: the mode, under a policy that of it."""
    uses_accelerate = run.script is None or run.script.uses_accelerate
    if uses_accelerate and not (run.script is None and not run.launches):
        yield deepspeed.mode_of_engine(mode, of_engine) if engine == "DEEPSPEED" else mode
        if mode.value == "fp8":
            yield from accelerate.fp8(run)
        if engine == "FSDP":
            yield from accelerate.fsdp(run, mode)
        if in_use == "fp16" and engine != "DEEPSPEED":
            yield from accelerate.loss_scaling(run)
        yield accelerate.compilation(run)
    yield from of_engine
    yield from accelerate.of_the_script(run)


def _refused(run: RunInputs, wanted: Policy, engine: str, strategy: str | None) -> Iterator[str]:
    """Yield the reasons for which mpguard refuses the policy, and `mpguard launch` the config."""
    try:
        require_supported("accelerate", wanted, strategy)
    except PolicyError as error:
        yield str(error)
    if conflict := compilation.conflict(wanted):
        yield conflict
    if run.config is None or run.launcher != "mpguard":
        return
    changes = tuple(differences(run.config.require(), wanted, "accelerate", strategy))
    plan = Plan(wanted, config=run.config.path, strategy=strategy, allow=mp_yaml.stored(run.config).allow)
    planned = preflight.PlannedLaunch(plan, run.config, engine, changes, accelerator=True)
    if preflight.runs_on_cpu(planned) and (missing := hardware.detect().cpu.refuses(wanted)):
        yield f"the policy `{wanted.name}` does not run on the CPU, which the config asks for: {missing}"
    for reason in preflight.config_refusals(planned):
        yield f"{reason}. `mpguard launch` refuses the run"


def _title(run: RunInputs, engine: str, document: Document | None, guarded: bool) -> str:
    files = [each.path for each in (run.config, document) if each is not None]
    files += [run.script.path] if run.script is not None else []
    launcher = {"accelerate": "accelerate launch", "mpguard": "mpguard launch"}.get(run.launcher, run.launcher)
    parts = [", ".join(Path(each).as_posix() for each in files) or "environment", launcher]
    if engine not in ("NO", "False"):
        parts.append(engine)
    elif run.launches and (run.config is not None or "cpu" in run.flags):
        parts.append("1 process")  # else as many as the machine has GPUs, or as another launcher starts
    return " · ".join([*parts, "with mpguard's policy" if guarded else "without mpguard"])
