"""Exchange the plans of all ranks where a process group is created."""

from __future__ import annotations

import functools
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime import plan_exchange
from mpguard.runtime.patches import checks


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

    return init_process_group
