"""Patches of Transformer Engine."""

from __future__ import annotations

import functools
from typing import Any

from mpguard.runtime import guard as guards
from mpguard.runtime.patches import fp8_conversion
from mpguard.runtime.patches.patch import AnyFunction, Patch


def _adam_init(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None and guard.converts_models:
            fp8_conversion.check_fp8_param(guard, guard.plan.strategy or "single", self)

    return __init__


PATCHES = (
    Patch(
        "transformer_engine.pytorch.optimizers.fused_adam",
        "FusedAdam.__init__",
        ("master_weights", "master_weight_dtype"),
        "its FP32 master weights exist after its own __init__ only, not after that of torch's Optimizer",
        "Transformer Engine 2.20.2",
        _adam_init,
    ),
)
