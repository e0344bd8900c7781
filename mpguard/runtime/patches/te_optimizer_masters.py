"""Show before models are converted if Transformer Engine's FusedAdam has FP32 masters."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks

#: The attributes and arguments of FusedAdam that show whether it has FP32 master weights.
MASTERS = ("master_weights", "master_weight_dtype", "store_param_remainders")


@patch(
    "transformer_engine.pytorch.optimizers.fused_adam:FusedAdam.__init__",
    needs=MASTERS,
    reason="models are converted in the __init__ of torch's Optimizer, where it does not show yet if it has "
    "FP32 masters",
    lost="parameters in FP8 are not kept with FusedAdam: it is not known if it has FP32 masters",
    check=checks.fused_adam,
)
def _adam_init(original: AnyFunction) -> AnyFunction:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        guard = guards.current()
        if guard is not None and guard.plan.policy.fp8_param:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            for name in MASTERS:  # as the original sets them, but before torch's __init__, where models are converted
                setattr(self, name, bound.arguments[name])
        original(self, *args, **kwargs)

    return __init__
