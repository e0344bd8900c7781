"""Which policies cannot be put into force without a patch: values of `required` in the table."""

from __future__ import annotations

from typing import Any


def any_policy(_policy: Any, _strategy: str | None) -> bool:
    """True: without the patch no run can be proven."""
    return True


def in_fp16(policy: Any, _strategy: str | None) -> bool:
    """True for FP16: without the loss scale of the policy."""
    return bool(policy.fp16)


def with_fsdp1(_policy: Any, strategy: str | None) -> bool:
    """True under FSDP1, whose dtypes are in an object that the patch replaces."""
    return strategy == "fsdp1"


def with_fsdp2(_policy: Any, strategy: str | None) -> bool:
    """True under FSDP2."""
    return strategy == "fsdp2"


def with_deepspeed(_policy: Any, strategy: str | None) -> bool:
    """True under DeepSpeed, whose config the patch replaces."""
    return bool(strategy and strategy.startswith("deepspeed"))


def with_compile_mode(policy: Any, _strategy: str | None) -> bool:
    """True for a mode of `torch.compile` that the policy demands."""
    return bool(policy.compile is True and policy.compile_mode != "default")


def with_fp8_weights_in_ddp(policy: Any, strategy: str | None) -> bool:
    """True if weights must be kept in FP8 under DDP, which broadcasts them inexactly."""
    return bool(policy.fp8_param is True and strategy == "ddp")
