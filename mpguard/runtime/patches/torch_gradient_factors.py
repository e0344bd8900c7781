"""Record what torch multiplies gradients by, clipping and the division by the loss scale, and what DDP hands to hooks.

Between these and backward passes, reductions and steps only the script changes gradients: see `HandOffs`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks
from mpguard.runtime.proof import remarks, samples
from mpguard.runtime.proof.observe import innermost
from mpguard.runtime.proof.products import short
from mpguard.runtime.proof.profiler import muted


@patch(
    "torch.nn.utils.clip_grad:clip_grad_norm_",
    needs=("parameters",),
    reason="clipping changes gradients between a backward pass and the step: what it finds and leaves is compared",
    lost="gradients that were clipped are not compared with those of the backward pass",
    check=checks.clipped,
)
@patch(
    "torch.nn.utils.clip_grad:clip_grad_value_",
    needs=("parameters",),
    reason="clipping changes gradients between a backward pass and the step: what it finds and leaves is compared",
    lost="gradients that were clipped are not compared with those of the backward pass",
    check=checks.clipped,
)
def _clip(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.waiting:
            return original(parameters, *args, **kwargs)
        own = [parameters] if not isinstance(parameters, Iterable) or hasattr(parameters, "grad") else list(parameters)
        _compare_with_scale(guard, own, args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value")))
        with guard.recorder.gradients.handoffs.around("before clipping", own), muted():
            norm = original(own, *args, **kwargs)
        guard.recorder.gradients.norm_dtype = short(norm.dtype) if hasattr(norm, "dtype") else ""
        return norm

    return clip


def _compare_with_scale(guard: guards.Guard, parameters: Sequence[Any], limit: Any) -> None:
    """Print a remark if gradients are clipped that are still multiplied by the loss scale."""
    if guard.plan.policy.fp16 and isinstance(limit, (int, float)):
        scale = samples.safely(guard.recorder.scaled_passes.scale_of, parameters) or 0.0
        if remark := remarks.clipped_while_scaled(scale, limit):
            guard.reporter.report_remarks([remark])


@patch(
    "torch.amp.grad_scaler:GradScaler.unscale_",
    needs=("optimizer",),
    reason="gradients that the script has divided by the loss scale itself are divided twice",
    lost="gradients that are divided twice by the loss scale are not reported",
    check=checks.scaled_step,
)
def _unscale(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def unscale_(self: Any, optimizer: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.waiting or not self.is_enabled():
            return original(self, optimizer)
        own = innermost(optimizer)
        with guard.recorder.gradients.handoffs.unscaling(own, self.get_scale()):
            result = original(self, optimizer)
        samples.safely(guard.recorder.scaled_passes.unscaled, own)
        return result

    return unscale_


@patch(
    "torch.nn.parallel.distributed:DistributedDataParallel.register_comm_hook",
    needs=("state", "hook"),
    reason="a hook that rounds gradients and sends them in FP32 is seen only where what it gets is compared",
    lost="gradients that a communication hook of DDP rounds and sends in FP32 are not reported",
    check=checks.ddp,
)
def _register_comm_hook(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def register_comm_hook(self: Any, state: Any, hook: Any) -> Any:
        if guards.current() is None or not hasattr(hook, "__name__"):
            return original(self, state, hook)

        @functools.wraps(hook)
        def observed(state: Any, bucket: Any) -> Any:
            guard = guards.current()
            if guard is None or not guard.waiting:
                return hook(state, bucket)
            with guard.recorder.comm_hooks.during(bucket, self.process_group.size()):
                return hook(state, bucket)

        return original(self, state, observed)

    return register_comm_hook
