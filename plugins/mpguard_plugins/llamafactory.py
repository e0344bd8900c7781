"""LLaMA-Factory: the precision options of its YAML.

Written for LLaMA-Factory 0.9.5, `hparams/training_args.py`, `train/fp8_utils.py` and `model/adapter.py`. `bf16` is
autocast on FP32 parameters where they train, `pure_bf16` has no FP32 parameters. Its FP8 is torchao's rowwise recipe,
or Transformer Engine's delayed scaling with a history of 16 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpguard import PolicyError
from mpguard.policy import Dtype, Policy
from mpguard.targets import ABSENT, Setting, Settings, plugin

_BACKENDS = ("auto", "torchao", "te", "msamp")


@plugin(
    "llamafactory",
    carries=("bf16", "fp16", "master_dtype", "tf32", "fp8", "fp4", "fp8_recipe", "compile"),
)
def llamafactory(policy: Policy, _strategy: str | None) -> Settings:
    """LLaMA-Factory's YAML."""
    if policy.fp4:
        raise PolicyError("llamafactory: the policy has fp4; LLaMA-Factory has FP8 only")
    if policy.fp8:
        _check_fp8(policy)
    pure = policy.master_dtype is Dtype.BF16
    settings: dict[str, Any] = {
        "bf16": _switch(policy.bf16 and not pure),
        "fp16": _switch(policy.fp16),
        "pure_bf16": _switch(pure),
        "fp8": _switch(policy.fp8 is not None),
    }
    if policy.fp8:
        settings["fp8_backend"] = Setting("torchao", equivalent=lambda found: found in ("auto", "torchao"))
        settings["fp8_enable_fsdp_float8_all_gather"] = Setting(
            ABSENT, "LLaMA-Factory logs it and does nothing else", equivalent=lambda found: not found
        )
    if policy.tf32 is not None:
        settings["tf32"] = policy.tf32
    if policy.fp8 and policy.compile is not False:
        settings["torch_compile"] = Setting(True, "without it FP8 is slower than BF16")
    elif policy.compile != "auto":
        settings["torch_compile"] = policy.compile
    return settings


def _check_fp8(policy: Policy) -> None:
    """Raise `PolicyError` for FP8 that LLaMA-Factory does not support, or mpguard does not write."""
    if policy.fp16:
        raise PolicyError(
            "llamafactory: the policy has fp8 with fp16; its fp8 computes the rest in bf16. Set bf16=True"
        )
    if policy.fp8 != "e4m3" or policy.fp8_recipe != "rowwise" or "torchao" not in policy.backends:
        raise PolicyError(
            f"llamafactory: fp8 is {policy.fp8} with fp8_recipe {policy.fp8_recipe} on {' or '.join(policy.backends)}; "
            "LLaMA-Factory has torchao's rowwise recipe (e4m3), and Transformer Engine's delayed scaling with a "
            "history of 16 steps. Use the recipe bf16_with_fp8_rowwise_mixed"
        )


def _switch(on: bool) -> Setting:
    """Return the setting of a switch that is off by default, where null and false are equivalent."""
    return Setting(True) if on else Setting(ABSENT, equivalent=lambda found: not found)


@llamafactory.detector
def is_config(config: Mapping[str, Any]) -> bool:
    """True for a config with `stage` and `finetuning_type`."""
    return "stage" in config and "finetuning_type" in config


@llamafactory.strategy_reader
def strategy_of(config: Mapping[str, Any]) -> str | None:
    """Return the version of FSDP that the config selects; None without FSDP, and for a DeepSpeed file."""
    return "fsdp1" if config.get("fsdp") else None


@llamafactory.reader
def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy fields of a LLaMA-Factory YAML."""
    found: dict[str, Any] = {}
    if config.get("pure_bf16") is True:
        found |= {"bf16": True, "master_dtype": "bf16"}
    elif config.get("bf16") is True:
        found["bf16"] = True
    elif config.get("fp16") is True:
        found["fp16"] = True
    if config.get("fp8") is True:
        found |= {"bf16": True, **_fp8_fields(config.get("fp8_backend", "auto"))}
    if isinstance(config.get("tf32"), bool):
        found["tf32"] = config["tf32"]
    if isinstance(config.get("torch_compile"), bool):
        found["compile"] = config["torch_compile"]
    return found


def _fp8_fields(backend: Any) -> dict[str, Any]:
    if backend in ("auto", "torchao"):
        return {"fp8": "e4m3", "fp8_recipe": "rowwise"}
    if backend == "te":
        return {
            "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max",
        }  # fmt: skip
    known = ", ".join(_BACKENDS)
    raise PolicyError(f"llamafactory: fp8_backend is {backend}; mpguard reads auto, torchao and te (known: {known})")
