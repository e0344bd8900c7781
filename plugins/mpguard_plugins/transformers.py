"""Hugging Face Trainer: keyword arguments of `TrainingArguments`.

`TrainingArguments` has no FP8: FP8 comes to the Trainer from accelerate (`mixed_precision: fp8`,
as ACCELERATE_MIXED_PRECISION in the workers), and `bf16=True` beside it turns it off without a word
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

    FP8 is carried in that the Trainer leaves it to accelerate. Without master weights the model must
    be loaded in the policy's dtype, and autocast is off. `tf32=True` is refused by TrainingArguments
    itself where there is no GPU that has it.
    """
    if policy.fp8 and policy.fp16:
        raise PolicyError(
            "transformers: the policy computes in fp16 beside fp8; accelerate, which runs FP8 for the Trainer, "
            "computes the rest in bf16. Set bf16=True"
        )
    autocast = not policy.fp8 and policy.master_dtype is Dtype.FP32
    why = ""
    if policy.fp8:
        why = "it would turn accelerate's fp8 off without a word"
    elif policy.low_precision and not autocast:
        why = "the model itself is in the policy's dtype"
    settings: dict[str, Any] = {
        "bf16": Setting(policy.bf16 and autocast, why if policy.bf16 else ""),
        "fp16": Setting(policy.fp16 and autocast, why if policy.fp16 else ""),
    }
    if policy.tf32 is not None:
        settings["tf32"] = policy.tf32
    if policy.compile != "auto":
        settings["torch_compile"] = policy.compile
    return settings


@transformers.argument_builder
def arguments(policy: Policy, strategy: str | None) -> dict[str, Any]:
    """Refuses FP8 where accelerate is not told of it: the run would be in FP32."""
    found = {key: setting.value for key, setting in transformers.settings(policy, strategy).items()}
    if policy.fp8 and os.environ.get("ACCELERATE_MIXED_PRECISION") != "fp8":
        raise PolicyError(
            f"transformers: the policy `{policy.name}` has FP8, which TrainingArguments cannot say. Launch with "
            "`mixed_precision: fp8` (mpguard launch, accelerate launch), and leave bf16 and fp16 out of "
            "TrainingArguments"
        )
    return found


@transformers.reader
def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: True for name in ("bf16", "fp16") if config.get(name) is True}
    if isinstance(config.get("tf32"), bool):
        found["tf32"] = config["tf32"]
    if isinstance(config.get("torch_compile"), bool):
        found["compile"] = config["torch_compile"]
    return found
