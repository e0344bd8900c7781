"""Hugging Face Trainer: keyword arguments of `TrainingArguments`.

`TrainingArguments` has no FP8: the Trainer gets FP8 from accelerate (`mixed_precision: fp8`, as
ACCELERATE_MIXED_PRECISION in the workers), and `bf16=True` silently turns it off
(transformers 5.23, `TrainingArguments.__post_init__`, "Mixed Precision"). So for an FP8 policy the
settings are `bf16=False, fp16=False`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mpguard import PolicyError
from mpguard.policy import Dtype, Policy
from mpguard.targets import Setting, Settings, plugin


@plugin(
    "transformers",
    carries=("bf16", "fp16", "fp8", "master_dtype", "tf32", "compile"),
    extra="transformers",
    library="transformers",
)
def transformers(policy: Policy, _strategy: str | None) -> Settings:
    """Keyword arguments of `TrainingArguments`, also as its JSON or YAML.

    FP8 is carried because the Trainer leaves it to accelerate. Without master weights the model must be loaded in the
    policy's dtype, and autocast is off. TrainingArguments itself refuses `tf32=True` on a machine without a GPU that
    supports it.
    """
    if policy.fp8 and policy.fp16:
        raise PolicyError(
            "transformers: the policy has fp8 with fp16; accelerate, which runs FP8 for the Trainer, "
            "computes the rest in bf16. Set bf16=True"
        )
    autocast = not policy.fp8 and policy.master_dtype is Dtype.FP32
    reason = ""
    if policy.fp8:
        reason = "it would silently turn accelerate's fp8 off"
    elif policy.low_precision and not autocast:
        reason = "the model itself is in the policy's dtype"
    settings: dict[str, Any] = {
        "bf16": Setting(policy.bf16 and autocast, reason if policy.bf16 else ""),
        "fp16": Setting(policy.fp16 and autocast, reason if policy.fp16 else ""),
    }
    if policy.tf32 is not None:
        settings["tf32"] = policy.tf32
    if policy.compile != "auto":
        settings["torch_compile"] = policy.compile
    return settings


@transformers.argument_builder
def arguments(policy: Policy, strategy: str | None) -> dict[str, Any]:
    """Return the settings. Raises `PolicyError` for FP8 where accelerate is not set to it: the run would be in FP32."""
    found = {key: setting.value for key, setting in transformers.settings(policy, strategy).items()}
    if policy.fp8 and os.environ.get("ACCELERATE_MIXED_PRECISION") != "fp8":
        raise PolicyError(
            f"transformers: the policy `{policy.name}` has FP8, which TrainingArguments cannot express. Launch with "
            "`mixed_precision: fp8` (mpguard launch, accelerate launch), and leave bf16 and fp16 out of "
            "TrainingArguments"
        )
    return found


@transformers.reader
def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy fields that arguments of the Trainer set."""
    found = {name: True for name in ("bf16", "fp16") if config.get(name) is True}
    if isinstance(config.get("tf32"), bool):
        found["tf32"] = config["tf32"]
    if isinstance(config.get("torch_compile"), bool):
        found["compile"] = config["torch_compile"]
    return found
