"""Convert models before DDP takes them, and end its process groups."""

from __future__ import annotations

import functools
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime.exit_hooks import drain_gloo_threads
from mpguard.runtime.patches import checks, fp8_conversion, fp32_modules, master_weights, required


@patch(
    "torch.nn.parallel.distributed:DistributedDataParallel.__init__",
    needs=("module", "init_sync"),
    reason="DDP keeps references to parameters, and broadcasts FP8 ones inexactly: convert first, broadcast "
    "exact values",
    lost="DDP broadcasts weights before they are converted, FP8 ones inexactly",
    check=checks.ddp,
    required=required.with_fp8_weights_in_ddp,
)
def _ddp_init(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        guard = guards.current()
        init = original
        if guard is not None:
            fp32_modules.keep_in_model(guard, [module])
        if guard is not None and guard.plan.policy.fp8_param:
            from mpguard.nn.fp8.weights import broadcast_masters

            fp8_conversion.convert_before_ddp(guard, module)
            init = broadcast_masters(original)
        if guard is not None:
            master_weights.keep_in_model(guard, module)
        init(self, module, *args, **kwargs)
        if guard is not None:
            master_weights.share(guard, self)

    return __init__


@patch(
    "torch.distributed.algorithms.model_averaging.averagers:ModelAverager.__init__",
    needs=("process_group",),
    reason="gradients may differ between ranks where it averages the weights",
    lost="gradients that differ between ranks are refused where the weights are averaged",
    check=checks.ddp,
)
def _averager_init(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.recorder.averaging = type(self).__name__

    return __init__


@patch(
    "torch.distributed.distributed_c10d:destroy_process_group",
    needs=("group",),
    reason="a gloo group that is destroyed with the GIL held waits for a thread that waits for the GIL (S26)",
    lost="a run on gloo may hang when its process group is destroyed",
    check=checks.ddp,
)
def _destroy_process_group(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if guards.current() is not None:
            drain_gloo_threads()
        original(group)

    return destroy_process_group
