"""Exchange the plans of all ranks where a process group is created, and report ranks that stand still."""

from __future__ import annotations

import functools
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import compile_progress, plan_exchange, stacks
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks
from mpguard.runtime.proof.collectives import number_of_calls
from mpguard.runtime.ranks import world_size


@patch(
    "torch.distributed.distributed_c10d:init_process_group",
    needs=("backend",),
    reason="ranks with different plans are refused before anything is built: each one's proof knows its own plan only",
    lost="ranks with different plans are found by the proof, or not",
    check=checks.ddp,
)
def _init_process_group(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        guard = guards.current()
        if guard is not None:
            plan_exchange.check(guard.plan, guard.refuse)
            if guard.listening and world_size()[0] > 1:
                stacks.report_standstill(lambda: not guard.is_unproven, functools.partial(_progress, guard))

    return init_process_group


def _progress(guard: guards.Guard) -> object:
    """Return something else after each backward pass and collective, and always while the process compiles."""
    return object() if compile_progress.is_compiling() else (guard.recorder.backwards, number_of_calls())
