"""The config of `deepspeed.initialize` under a policy: what is changed in it, and the optimizer class that follows."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpguard.core.errors import ConfigError
from mpguard.document import read
from mpguard.document.schemas.deepspeed import OBJECTS, other_optimizer, unfilled
from mpguard.policy.dtype import Dtype
from mpguard.runtime.plan import deepspeed_file, with_first_scale
from mpguard.runtime.proof.verdict import Refusal
from mpguard.targets.inject import Change, differences
from mpguard.targets.plugin import get
from mpguard.targets.settings import ABSENT, Setting, merged, show

if TYPE_CHECKING:
    from mpguard.runtime.guard import Guard


def arguments(given: dict[str, Any], guard: Guard) -> tuple[dict[str, Any], str]:
    """Return the arguments of `deepspeed.initialize` with the policy in the config, and what was changed, as text.

    A config that has the policy in another form (`torch_autocast` with FP32 parameters) is kept, and the plan gets
    that form. Raises `ConfigError` for a config that cannot be read.
    """
    config, where = given.get("config"), "deepspeed.initialize"
    if config is None:
        config = given.pop("config_params", None)
    parsed: Any = given.get("args")
    if config is None and getattr(parsed, "deepspeed_config", None) is not None:
        config = parsed.deepspeed_config
        given["args"] = copy.copy(parsed)
        given["args"].deepspeed_config = None
    if config is None:
        return given, ""
    if isinstance(config, (str, os.PathLike)):
        where, config = str(config), _read(str(config))
    # The attributes of a DeepSpeedConfig, and of transformers' HfDeepSpeedConfig.
    plain = getattr(config, "_param_dict", getattr(config, "config", config))
    if not isinstance(plain, Mapping):
        raise ConfigError(f"deepspeed.initialize: config is a {type(config).__name__}; a dict or a file is needed")
    created = [name for name, (argument, _) in OBJECTS.items() if given.get(argument) is None]
    if keys := list(unfilled(plain, created)):
        raise ConfigError(
            f'{where}: {", ".join(f"`{key}`" for key in keys)} {"are" if len(keys) > 1 else "is"} "auto", which the '
            "Trainer and accelerate fill in, and nobody here: DeepSpeed stops. Write values"
        )
    plain = _as_written(plain, guard)
    _keep_form(plain, where, guard)
    policy = guard.plan.policy
    if policy.params_dtype is Dtype.FP16:
        policy = with_first_scale(policy)
    guard.first_scale = policy.initial_loss_scale if policy.fp16 and policy.loss_scale is None else None
    changes = differences(plain, policy, "deepspeed")
    for change in changes:
        if change.overrides:
            guard.reporter.log_override(where, change)
    result = merged(plain, {change.key: Setting(change.new) for change in changes})
    for line in _consequences(plain, result, changes):
        guard.reporter.print_once(f"{where}: {line}")
    listed = ", ".join(f"{each.key}: {show(each.old)} -> {show(each.new)}" for each in changes if not each.implied)
    return {**given, "config": result}, listed


def _as_written(config: Mapping[str, Any], guard: Guard) -> Mapping[str, Any]:
    """Return a config without the section that accelerate adds for its mode to a file with `torch_autocast`."""
    path = Path(guard.plan.config) if guard.plan.config else None
    mine = read(path) if path is not None and path.is_file() else None
    if path is None or mine is None or mine.problems or not isinstance(mine.data, dict):
        return config
    document = deepspeed_file(mine.data, path)
    if document is None or document.problems or not isinstance(document.data, dict):
        return config
    policy = guard.plan.policy
    if document.data.get("torch_autocast") != config.get("torch_autocast"):
        return config
    if get("deepspeed").policy_for(document.data, policy) == policy:
        return config
    return {**config, "bf16": {"enabled": False}, "fp16": {"enabled": False}}


def _keep_form(config: Mapping[str, Any], where: str, guard: Guard) -> None:
    """Give the plan the form of its policy that a config has, and report that."""
    policy = guard.plan.policy
    form = get("deepspeed").policy_for(config, policy)
    if form == policy:
        return
    guard.plan = dataclasses.replace(guard.plan, policy=form)
    guard.reporter.print_once(
        f"{where}: torch_autocast in {form.compute_dtype} is kept: parameters in {form.params_dtype}, as with "
        f"params_dtype: {form.params_dtype} of the policy"
    )


def _consequences(before: Mapping[str, Any], after: Mapping[str, Any], changes: list[Change]) -> Iterator[str]:
    """Yield what is added to a config with an effect on numbers, and the optimizer class that it selects."""
    added = [each for each in changes if not each.overrides and each.reason and each.new is not ABSENT]
    if added:
        yield "added " + ", ".join(f"{each.key}: {show(each.new)} ({each.reason})" for each in added)
    if line := other_optimizer(before, after):
        yield line


def muon_states(engine: Any, guard: Guard) -> Refusal | None:
    """Return the refusal of an engine whose Muon will not have its momentum in the policy's dtype; None if it will.

    ZeRO's `_muon_momentum_buffer` (deepspeed 0.19.8) gives the momentum the dtype of `param.grad`, which is that of the
    parameters, whatever `grad_accum_dtype` is. `BF16_Optimizer` has it in FP32.
    """
    momentum = guard.plan.muon_momentum
    if momentum is None or "muon" not in type(engine.basic_optimizer).__name__.lower():
        return None
    if type(engine.optimizer).__name__ != "DeepSpeedZeroOptimizer":
        return None
    dtype, advice = momentum
    return Refusal.wrong(
        f"optimizer: DeepSpeed's ZeRO-{engine.zero_optimization_stage()} holds the momentum of "
        f"{type(engine.basic_optimizer).__name__} in {dtype}, the dtype of the parameters; asked: states "
        f"{guard.plan.policy.master_dtype}",
        "optimizer",
        f"Use {advice}",
    )


def _read(name: str) -> dict[str, Any]:
    """Read a DeepSpeed config from a path or from base64, as DeepSpeed does. Raises `ConfigError`."""
    if Path(name).is_file():
        return read(Path(name)).require()
    try:
        import base64

        loaded = json.loads(base64.urlsafe_b64decode(name).decode("utf-8"))
    except (ValueError, UnicodeDecodeError):
        raise ConfigError(
            f"{name}: there is no such file; deepspeed.initialize needs the path of a DeepSpeed config"
        ) from None
    return dict(loaded)
