"""NeMo 1.x: the precision keys of `megatron_gpt_config.yaml`.

NeMo 2's `MegatronMixedPrecision` has Megatron Bridge's field names: use target `megatron`.
FP8 in NeMo 1.x is Transformer Engine's delayed scaling; its switches are two booleans for the format, which have no
effect unless `transformer_engine` is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpguard import PolicyError
from mpguard.policy import Dtype, Policy
from mpguard.targets import ABSENT, Setting, Settings, plugin

_PRECISIONS = {
    Dtype.BF16: ("bf16", "bf16-mixed"),
    Dtype.FP16: (16, "16", "16-mixed"),
    Dtype.FP32: (32, "32", "32-true"),
}


@plugin(
    "nemo",
    carries=(
        "bf16", "fp16", "params_dtype", "autocast_enabled", "initial_loss_scale", "loss_scale_window", "hysteresis",
        "fp8", "fp4", "fp8_recipe", "fp8_margin", "fp8_amax_history_len",
        "fp8_amax_compute_algo", "reduce_amax", "fp8_param", "fp8_param_gather",
    ),
)  # fmt: skip
def nemo(policy: Policy, _strategy: str | None) -> Settings:
    """NeMo 1.x's YAML: `trainer.precision`, and the keys of `model`.

    With `megatron_amp_O2` the parameters are in the compute dtype, with FP32 main parameters in addition; without it
    torch.autocast casts the inputs of each matmul.
    """
    if policy.fp4 or (policy.fp8 and (policy.fp8_recipe != "delayed" or "te" not in policy.backends)):
        raise PolicyError(
            f"nemo: the policy `{policy.name}` has the recipe {policy.low_bit_recipe}; NeMo 1.x has FP8 with delayed "
            "scaling on Transformer Engine only. Use a delayed_scaling recipe, or target `megatron`"
        )
    spellings = _PRECISIONS[policy.compute_dtype]
    o2 = policy.params_dtype is not Dtype.FP32 and not policy.autocast_enabled
    settings: dict[str, Any] = {
        "trainer.precision": Setting(
            spellings[0], equivalent=lambda found: found in spellings and not isinstance(found, bool)
        ),
        "model.megatron_amp_O2": o2 if policy.low_precision else _off(),
    }
    if policy.fp16:
        settings |= {
            "model.native_amp_init_scale": policy.initial_loss_scale,
            "model.native_amp_growth_interval": policy.loss_scale_window,
            "model.hysteresis": policy.hysteresis,
        }
    if not policy.fp8:
        return {**settings, "model.fp8": _off()}
    return {
        **settings,
        "model.transformer_engine": Setting(True, "without it NeMo ignores every FP8 key"),
        "model.fp8": True,
        "model.fp8_e4m3": policy.fp8 == "e4m3",
        "model.fp8_hybrid": policy.fp8 == "hybrid",
        "model.fp8_margin": policy.fp8_margin,
        "model.fp8_amax_history_len": policy.fp8_amax_history_len,
        "model.fp8_amax_compute_algo": policy.fp8_amax_compute_algo,
        "model.reduce_amax": policy.reduce_amax,
        "model.fp8_params": bool(policy.fp8_param),
    }


def _off() -> Setting:
    """Return the setting of a switch that is off: absent or false."""
    return Setting(ABSENT, equivalent=lambda found: not found)


@nemo.detector
def is_config(config: Mapping[str, Any]) -> bool:
    """True for a config of a Megatron model of NeMo 1.x: `trainer`, and keys of `model` that only these have."""
    own = ("megatron_amp_O2", "transformer_engine", "fp8_e4m3", "fp8_hybrid", "native_amp_init_scale", "mcore_gpt")
    model, trainer = config.get("model"), config.get("trainer")
    return isinstance(model, Mapping) and isinstance(trainer, Mapping) and any(key in model for key in own)


@nemo.reader
def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy fields of a NeMo 1.x YAML, or of its `model` section, or of the FP8 arguments alone.

    Raises `PolicyError` if `fp8` is on and `transformer_engine` is off: NeMo would train without FP8.
    """
    model = config.get("model", config)
    precision = config.get("trainer", config).get("precision")
    low = next(
        (name for name, dtype in (("bf16", Dtype.BF16), ("fp16", Dtype.FP16)) if precision in _PRECISIONS[dtype]), None
    )
    if low is None and precision is None and model.get("fp8"):
        low = "bf16"  # the FP8 arguments alone do not set the rest, and NeMo's FP8 examples train in BF16
    found: dict[str, Any] = {low: True} if low else {}
    if low and model.get("megatron_amp_O2") is False:
        found["params_dtype"] = "fp32"
    if low == "fp16":
        names = {
            "native_amp_init_scale": "initial_loss_scale",
            "native_amp_growth_interval": "loss_scale_window",
            "hysteresis": "hysteresis",
        }
        found |= {field: model[name] for name, field in names.items() if name in model}
    if not model.get("fp8"):
        return found
    if not model.get("transformer_engine", False):
        raise PolicyError("nemo: `fp8` is true and `transformer_engine` is not; NeMo ignores FP8 then. Set it to true")
    same = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "reduce_amax")
    return {
        **found,
        "fp8": "e4m3" if model.get("fp8_e4m3") else "hybrid",
        "fp8_recipe": "delayed",
        **{name: model[name] for name in same if name in model},
        **({"fp8_param": model["fp8_params"]} if model.get("fp8_params") is not None else {}),
    }
