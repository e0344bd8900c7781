"""DeepSpeed: the dict, or JSON file, that `deepspeed.initialize` and `DeepSpeedConfig` take.

DeepSpeed itself has no FP8: FP8 modules run inside its BF16 or FP16 engine. It silently ignores unknown sections, so
`fp8`, `bfloat16` and `amp` are removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mpguard import PolicyError
from mpguard.policy import Dtype, Policy
from mpguard.targets import ABSENT, Setting, Settings, lookup, plugin

_SCALING = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_STAGES = {1: "deepspeed-zero1", 2: "deepspeed-zero2", 3: "deepspeed-zero3"}


@plugin(
    "deepspeed",
    carries=(
        "bf16", "fp16", "params_dtype", "master_dtype", "grad_reduce_in_fp32", "buffer_dtype",
        "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis",
    ),
    extra="deepspeed",
    library="deepspeed",
)  # fmt: skip
def deepspeed(policy: Policy, strategy: str | None) -> Settings:
    """A config that `DeepSpeedConfig` accepts.

    With FP32 parameters and BF16 or FP16 compute, `torch_autocast` replaces the `bf16` and `fp16` sections. Settings
    that depend on ZeRO (the dtype in which gradients are stored after the reduction) need a strategy, or a config that
    states its stage.
    """
    engine = policy.params_dtype
    autocast = policy.low_precision and engine is Dtype.FP32
    zero = strategy in _STAGES.values()
    settings: dict[str, Any] = {
        "bf16.enabled": Setting(engine is Dtype.BF16, default=False),
        "fp16.enabled": Setting(engine is Dtype.FP16, default=False),
        "fp8": Setting(ABSENT, "DeepSpeed ignores this section"),
        "bfloat16": Setting(ABSENT, "the old name of bf16, ignored next to it"),
        "amp": Setting(ABSENT, "DeepSpeed has removed Apex AMP"),
    }
    if autocast:
        settings |= {
            "torch_autocast.enabled": True,
            "torch_autocast.dtype": Setting(policy.compute_dtype.short, equivalent=_means(policy.compute_dtype)),
            "torch_autocast.lower_precision_safe_modules": Setting(
                [], f"otherwise gradients of Linear and convolutions are reduced in {policy.compute_dtype}"
            ),
        }
    else:
        settings["torch_autocast"] = Setting(ABSENT, f"a second precision in addition to {engine}", equivalent=_off)
    settings |= _reduction(policy, zero)
    if policy.buffer_dtype is not None:
        settings["data_types.buffer_dtype"] = Setting(policy.buffer_dtype.short, equivalent=_means(policy.buffer_dtype))
    if engine is Dtype.BF16:
        settings |= _master(policy, strategy)
    if engine is Dtype.FP16:
        settings |= _loss_scale(policy)
    elif autocast and policy.fp16:
        _refuse_loss_scale(policy)
    return settings


def _reduction(policy: Policy, zero: bool) -> dict[str, Any]:
    """Return the settings of the dtypes in which gradients are reduced, and stored after the reduction."""
    reduce, engine = policy.reduce_dtype, policy.params_dtype
    if engine is not Dtype.FP32 and reduce is Dtype.FP32:
        reason = f"DeepSpeed would reduce in {engine}"
        stored = Setting(
            "fp32", f"DeepSpeed would keep the reduced gradients in {engine}", equivalent=_means(Dtype.FP32)
        )
        return {
            "communication_data_type": Setting("fp32", reason, equivalent=_reduces(Dtype.FP32)),
            # Without ZeRO, DeepSpeed refuses two different dtypes here.
            **({"data_types.grad_accum_dtype": stored} if zero and policy.master_dtype is Dtype.FP32 else {}),
        }
    return {
        "communication_data_type": Setting(
            ABSENT, f"the policy reduces in {reduce}, the default", equivalent=_reduces(reduce)
        ),
        **({"data_types.grad_accum_dtype": Setting(ABSENT, equivalent=_means(reduce))} if zero else {}),
    }


def _master(policy: Policy, strategy: str | None) -> dict[str, Any]:
    """Return the settings of master weights. Raises `PolicyError` for a run without them outside of ZeRO."""
    keys = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
    if policy.master_dtype is Dtype.FP32:
        return {key: Setting(ABSENT, "the policy keeps FP32 master weights", equivalent=_off) for key in keys}
    if strategy is not None and strategy not in _STAGES.values():
        raise PolicyError(
            f"deepspeed: master_dtype is {policy.master_dtype} under strategy {strategy}; "
            "DeepSpeed can omit FP32 master weights only under ZeRO. Use deepspeed-zero1, -zero2 or -zero3"
        )
    return dict.fromkeys(keys, True)


def _loss_scale(policy: Policy) -> dict[str, Any]:
    cast = Setting(True, "inputs are cast to FP16, as accelerate does", equivalent=lambda _found: True)
    if policy.loss_scale is not None:
        return {"fp16.loss_scale": policy.loss_scale, "fp16.auto_cast": cast}
    if not policy.min_loss_scale.is_integer():
        raise PolicyError(
            f"deepspeed: min_loss_scale is {policy.min_loss_scale:g}; `fp16.min_loss_scale` must be a whole number. "
            f"Set it to {max(1, round(policy.min_loss_scale))}"
        )
    return {
        "fp16.loss_scale": Setting(0, "dynamic", default=0),
        "fp16.initial_scale_power": Setting(_power(policy.initial_loss_scale), default=16),
        "fp16.loss_scale_window": Setting(policy.loss_scale_window, default=1000),
        "fp16.min_loss_scale": Setting(int(policy.min_loss_scale), default=1),
        "fp16.hysteresis": Setting(policy.hysteresis, default=2),
        "fp16.auto_cast": cast,
    }


def _power(scale: float) -> int:
    """Return the exponent of a scale that is a power of two. Raises `PolicyError` for any other scale."""
    mantissa, exponent = math.frexp(scale)
    power = exponent - 1
    if mantissa != 0.5 or power < 0:
        low = max(power, 0)
        raise PolicyError(
            f"deepspeed: initial_loss_scale is {scale:g}; `fp16.initial_scale_power` requires a power of two. "
            f"Set it to {2**low} or {2 ** (low + 1)}"
        )
    return power


def _refuse_loss_scale(policy: Policy) -> None:
    """Raise `PolicyError` for loss scale settings, which the GradScaler of `torch_autocast` does not have."""
    for field in _SCALING:
        if policy.explicit(field):
            raise PolicyError(
                f"deepspeed: {field} is {policy.format_field(field)} with fp16 and params_dtype fp32; its "
                "`torch_autocast` has a GradScaler without settings. Remove the field, or set params_dtype to fp16"
            )


def _off(found: Any) -> bool:
    """True if a switch, or a section, is not on. DeepSpeed treats `enabled: "auto"` as on."""
    return not (found.get("enabled") if isinstance(found, Mapping) else found)


def _means(dtype: Dtype) -> Callable[[Any], bool]:
    """Return a function that is true for any spelling of a dtype."""
    return lambda found: isinstance(found, str) and Dtype.spelled(found) is dtype


def _reduces(dtype: Dtype) -> Callable[[Any], bool]:
    """The same for `communication_data_type`, where DeepSpeed parses the short names only."""
    return lambda found: isinstance(found, str) and found.lower() == dtype.short


@deepspeed.detector
def is_config(config: Mapping[str, Any]) -> bool:
    """True for keys that only DeepSpeed has, or one of its sections with an `enabled` switch."""
    keys = (
        "zero_optimization",
        "train_micro_batch_size_per_gpu",
        "torch_autocast",
        "zero_allow_untested_optimizer",
    )
    sections = [config.get(name) for name in ("bf16", "fp16", "zero_optimization", "torch_autocast")]
    if "compute_environment" in config or "base_model" in config:
        return False
    # `train_batch_size` is a common name, so it is evidence only if every other key is one of DeepSpeed's.
    common = {
        "optimizer", "scheduler", "steps_per_print", "wall_clock_breakdown", "prescale_gradients",
        "communication_data_type", "data_types",
    }  # fmt: skip
    batch = {"train_batch_size", "gradient_accumulation_steps", "gradient_clipping", *common}
    return (
        any(key in config for key in keys)
        or ("train_batch_size" in config and set(config) <= batch)
        or any(isinstance(section, Mapping) and "enabled" in section for section in sections)
    )


@deepspeed.strategy_reader
def strategy_of(config: Mapping[str, Any]) -> str | None:
    """Return the strategy of the ZeRO stage; `single` for stage 0, None if no stage is stated."""
    stage = lookup(config, "zero_optimization.stage")
    return _STAGES.get(stage, "single" if stage == 0 else None) if isinstance(stage, int) else None


@deepspeed.equivalent
def policy_for(config: Mapping[str, Any], policy: Policy) -> Policy:
    """Return the policy with FP32 parameters for a config that computes through `torch_autocast`.

    Parameters and optimizer states are FP32 then, and the inputs of each matmul are cast: the same policy as a `bf16`
    section with FP32 master weights. Without its own loss scaling settings, FP16 has this form too.
    """
    dtype = lookup(config, "torch_autocast.dtype")
    on = [name for name in ("bf16", "fp16") if lookup(config, f"{name}.enabled") not in (False, ABSENT)]
    if lookup(config, "torch_autocast.enabled") is not True or on or not isinstance(dtype, str):
        return policy
    same = policy.low_precision and Dtype.spelled(dtype) is policy.compute_dtype
    masters = policy.master_dtype is Dtype.FP32 and policy.master_weights == "model"
    if not same or not masters or any(policy.explicit(name) for name in _SCALING):
        return policy
    return policy.replace(params_dtype=Dtype.FP32, name=policy.name)


@deepspeed.reader
def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy fields that a DeepSpeed config sets. "auto" sets nothing."""
    low = next((name for name in ("bf16", "fp16") if lookup(config, f"{name}.enabled") is True), None)
    found: dict[str, Any] = {}
    if isinstance(buffers := lookup(config, "data_types.buffer_dtype"), str):
        found["buffer_dtype"] = buffers
    autocast = lookup(config, "torch_autocast.enabled") is True
    if low:
        found[low] = True
    elif autocast:
        dtype = Dtype.parse(str(lookup(config, "torch_autocast.dtype")))
        found |= {"bf16" if dtype is Dtype.BF16 else "fp16": True, "params_dtype": "fp32"}
    else:
        return found
    if not autocast:
        reduce = lookup(config, "communication_data_type")
        found["grad_reduce_in_fp32"] = isinstance(reduce, str) and Dtype.spelled(reduce) is Dtype.FP32
    if lookup(config, "bf16.bf16_master_weights_and_grads") is True:
        found["master_dtype"] = "bf16"
    if low == "fp16":
        found |= _scale_fields(config)
    return found


def _scale_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of loss scaling, with DeepSpeed's defaults for absent keys."""
    scale = lookup(config, "fp16.loss_scale")
    if isinstance(scale, (int, float)) and scale > 0:
        return {"loss_scale": float(scale)}
    defaults = {"initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1, "hysteresis": 2}
    found = {key: lookup(config, f"fp16.{key}") for key in defaults}
    values = {key: value if value is not ABSENT else defaults[key] for key, value in found.items()}
    return {"initial_loss_scale": 2.0 ** values.pop("initial_scale_power"), **values}
