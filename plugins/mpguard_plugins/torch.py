"""A custom training loop: autocast arguments, GradScaler, TF32 switches.

    precision = policy.to("torch")
    precision.set_tf32()
    model = model.to(precision.parameters)
    scaler = precision.scaler("cuda")
    for inputs, targets in data:
        with torch.autocast(**precision.autocast("cuda")):
            loss = criterion(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

The same lines work for every policy: without FP16 the scaler is disabled and changes nothing, and with an FP32 compute
dtype autocast is disabled.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from mpguard.policy import Dtype, Policy
from mpguard.targets import Settings, plugin

if TYPE_CHECKING:
    import torch

#: GradScaler has no fixed scale, and requires a growth factor above 1 and a backoff factor below 1. These are the
#: nearest ones; its scale is FP32, in which a matmul with them rounds back to the scale itself.
FIXED_SCALE = {"growth_factor": math.nextafter(1.0, 2.0), "backoff_factor": math.nextafter(1.0, 0.0)}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The precision of a custom training loop.

    Attributes: `compute`, the dtype of autocast, None if it is off; `parameters`, the dtype of the model when the
    optimizer is created; `tf32`, True, False, or None (not changed); `scaling`, the arguments of the GradScaler;
    `sharded`, True for FSDP1's GradScaler; `limits`, the arguments of `mpguard.nn.grad_scaler.set_limits`, which
    torch's GradScaler does not support.
    """

    compute: torch.dtype | None
    parameters: torch.dtype
    tf32: bool | None
    scaling: dict[str, Any]
    sharded: bool = False
    limits: dict[str, Any] = dataclasses.field(default_factory=dict)

    def autocast(self, device_type: str = "cuda") -> dict[str, Any]:
        """Return the keyword arguments of `torch.autocast` for a device type (`cuda`, `cpu`, ...)."""
        if self.compute is None:
            return {"device_type": device_type, "enabled": False}
        return {"device_type": device_type, "dtype": self.compute, "enabled": True}

    def scaler(self, device: str = "cuda") -> torch.amp.GradScaler:
        """Return a GradScaler with the policy's loss scale; disabled without FP16."""
        if self.sharded:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            return self.set_limits(ShardedGradScaler(device, **self.scaling))
        import torch

        return self.set_limits(torch.amp.GradScaler(device, **self.scaling))

    def set_limits(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        """Give a scaler the policy's minimum scale and hysteresis, and return it."""
        if self.limits:
            from mpguard.nn.grad_scaler import set_limits

            set_limits(scaler, **self.limits)
        return scaler

    def set_tf32(self) -> None:
        """Set TF32 for matmuls and convolutions on CUDA in this process, if the policy sets it."""
        if self.tf32 is None:
            return
        import torch

        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32


@plugin(
    "torch",
    carries=(
        "bf16", "fp16", "master_dtype", "tf32",
        "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis",
    ),
    extra="accelerate",
    library="torch",
)  # fmt: skip
def loop(policy: Policy, strategy: str | None) -> Settings:
    """Autocast, GradScaler and TF32 of a custom training loop, as one object.

    Without master weights (`master_dtype` is the compute dtype) the model itself is in that dtype and autocast is off.
    torch's GradScaler does not support `min_loss_scale` and `hysteresis`; `mpguard.nn.grad_scaler` does.
    """
    autocast = policy.low_precision and policy.master_dtype is Dtype.FP32
    return {
        "compute": policy.compute_dtype.short if autocast else None,
        "parameters": policy.master_dtype.short,
        "tf32": policy.tf32,
        "scaling": scaling(policy),
        "sharded": policy.fp16 and strategy == "fsdp1",
        "limits": {"minimum": policy.min_loss_scale, "hysteresis": policy.hysteresis}
        if policy.fp16 and policy.loss_scale is None
        else {},
    }


def scaling(policy: Policy) -> dict[str, Any]:
    """Return the arguments of a GradScaler for a policy."""
    if not policy.fp16:
        return {"enabled": False}
    if policy.loss_scale is not None:
        return {"enabled": True, "init_scale": policy.loss_scale, **FIXED_SCALE}
    return {"enabled": True, "init_scale": policy.initial_loss_scale, "growth_interval": policy.loss_scale_window}


@loop.builder
def precision(arguments: dict[str, Any]) -> Precision:
    compute, parameters = arguments["compute"], arguments["parameters"]
    return Precision(
        **{
            **arguments,
            "compute": Dtype.parse(compute).torch if compute else None,
            "parameters": Dtype.parse(parameters).torch,
        }
    )
