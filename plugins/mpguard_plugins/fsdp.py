"""FSDP of PyTorch: the mixed precision objects of version 1 and of version 2 (`fully_shard`).

By default FSDP reduces gradients in the parameters' dtype; here the policy decides. The dtype of the sharded parameters
that the optimizer updates is that of the model before it is wrapped: neither object has a field for `master_dtype`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpguard.policy import Dtype, Policy
from mpguard.targets import Setting, Settings, plugin

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

_CARRIES = ("bf16", "fp16", "params_dtype", "grad_reduce_in_fp32")


def _common(policy: Policy) -> dict[str, Any]:
    assert policy.params_dtype is not None  # `Policy` sets its default
    return {
        "param_dtype": policy.params_dtype.short,
        "reduce_dtype": Setting(policy.reduce_dtype.short, "without it FSDP reduces in param_dtype"),
    }


def _short(dtype: Dtype | None) -> str | None:
    return dtype.short if dtype is not None else None


@plugin("fsdp1", carries=(*_CARRIES, "buffer_dtype"), extra="accelerate", library="torch")
def fsdp1(policy: Policy, _strategy: str | None) -> Settings:
    """`torch.distributed.fsdp.MixedPrecision`. It has no field for `output_dtype`: outputs are not cast."""
    return {**_common(policy), "buffer_dtype": _short(policy.buffer_dtype)}


@fsdp1.builder
def mixed_precision(arguments: dict[str, Any]) -> MixedPrecision:
    from torch.distributed.fsdp import MixedPrecision

    return MixedPrecision(**_dtypes(arguments))


@plugin("fsdp2", carries=(*_CARRIES, "output_dtype"), extra="accelerate", library="torch")
def fsdp2(policy: Policy, _strategy: str | None) -> Settings:
    """`torch.distributed.fsdp.MixedPrecisionPolicy`. It has no field for `buffer_dtype`: buffers are not cast."""
    return {**_common(policy), "output_dtype": _short(policy.output_dtype), "cast_forward_inputs": True}


@fsdp2.builder
def mixed_precision_policy(arguments: dict[str, Any]) -> MixedPrecisionPolicy:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(**_dtypes(arguments))


def _dtypes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with dtypes of torch."""
    return {name: Dtype.parse(value).torch if isinstance(value, str) else value for name, value in arguments.items()}
