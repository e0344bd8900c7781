"""Patches of what torch multiplies gradients by: clipping, and the division by the loss scale.

Between these and backward passes, reductions and steps only the script changes gradients: see `HandOffs`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from mpguard.runtime import guard as guards
from mpguard.runtime.patches.patch import AnyFunction, Patch
from mpguard.runtime.proof.observe import innermost


def _clip(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.waiting:
            return original(parameters, *args, **kwargs)
        own = [parameters] if not isinstance(parameters, Iterable) or hasattr(parameters, "grad") else list(parameters)
        with guard.recorder.gradients.handoffs.around("before clipping", own):
            return original(own, *args, **kwargs)

    return clip


def _unscale(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def unscale_(self: Any, optimizer: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.waiting or not self.is_enabled():
            return original(self, optimizer)
        with guard.recorder.gradients.handoffs.unscaling(innermost(optimizer), self.get_scale()):
            return original(self, optimizer)

    return unscale_


PATCHES = (
    *(
        Patch(
            "torch.nn.utils.clip_grad",
            name,
            ("parameters",),
            "clipping changes gradients between a backward pass and the step: what it finds and leaves is compared",
            "torch 2.13.0",
            _clip,
        )
        for name in ("clip_grad_norm_", "clip_grad_value_")
    ),
    Patch(
        "torch.amp.grad_scaler",
        "GradScaler.unscale_",
        ("optimizer",),
        "gradients that the script has divided by the loss scale itself are divided twice",
        "torch 2.13.0",
        _unscale,
    ),
)
