"""Let other profilers of a program go first, and keep tensors of the recording exchangeable."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks
from mpguard.runtime.proof import profiler


@patch(
    "torch.autograd.profiler:profile._prepare_trace",
    needs=("self",),
    reason="one profiler runs at a time: that of the proof gives way to the program's",
    lost="the proof's recording collides with a profiler of the program",
    check=checks.profiled,
)
@patch(
    "torch.autograd.profiler:emit_nvtx.__enter__",
    needs=("self",),
    reason="one profiler runs at a time: that of the proof gives way to the program's",
    lost="the proof's recording collides with a profiler of the program",
    check=checks.profiled,
)
@patch(
    "torch.autograd.profiler:emit_itt.__enter__",
    needs=("self",),
    reason="one profiler runs at a time: that of the proof gives way to the program's",
    lost="the proof's recording collides with a profiler of the program",
    check=checks.profiled,
)
def _profiler_start(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if getattr(self, "enabled", True):
            profiler.other_profiler_starts(self)
            if guard is not None:
                guard.recorder.account.give_way()
        return original(self, *args, **kwargs)

    return start


@patch(
    "torch.autograd.profiler:profile.__exit__",
    needs=("self",),
    reason="when the program's profiler has ended, that of the proof can run",
    lost="the proof's recording collides with a profiler of the program",
    check=checks.profiled,
)
@patch(
    "torch.autograd.profiler:emit_nvtx.__exit__",
    needs=("self",),
    reason="when the program's profiler has ended, that of the proof can run",
    lost="the proof's recording collides with a profiler of the program",
    check=checks.profiled,
)
@patch(
    "torch.autograd.profiler:emit_itt.__exit__",
    needs=("self",),
    reason="when the program's profiler has ended, that of the proof can run",
    lost="the proof's recording collides with a profiler of the program",
    check=checks.profiled,
)
def _profiler_end(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __exit__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            profiler.other_profiler_ends(self)

    return __exit__


@patch(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    needs=("op_schema",),
    reason="DTensor runs each operator on fake tensors first, in FP32 inside of BF16 ones: they are no matmuls",
    lost="matmuls on DTensor's fake tensors count as computed",
    check=checks.dtensor,
)
def _without_data(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def propagate(*args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        with guard.recorder.account.range_without_data() if guard is not None else contextlib.nullcontext():
            return original(*args, **kwargs)

    return propagate


@patch(
    "torch.utils:swap_tensors",
    needs=("t1", "t2"),
    reason="torch exchanges no tensors that the profiler has seen: `Module.to` of FP8 parameters, FSDP2 on a GPU",
    lost="tensors that the profiler has seen cannot be exchanged: `Module.to` of FP8 parameters fails",
    check=checks.swap,
)
def _swap_tensors(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def swap_tensors(t1: Any, t2: Any) -> None:
        guard = guards.current()
        if guard is not None:
            guard.tensors_are_exchanged((t1, t2))
        from mpguard.nn.master_weights import exchanging

        with exchanging(t1, t2):
            original(t1, t2)

    return swap_tensors
