"""Patches of torch's process groups: where one is created, the ranks exchange their plans."""

from __future__ import annotations

import functools
from typing import Any

from mpguard.runtime import guard as guards
from mpguard.runtime import plan_exchange
from mpguard.runtime.patches.patch import AnyFunction, Patch


def _init_process_group(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        guard = guards.current()
        if guard is not None:
            plan_exchange.check(guard.plan, guard.refuse)

    return init_process_group


PATCHES = (
    Patch(
        "torch.distributed.distributed_c10d",
        "init_process_group",
        ("backend",),
        "ranks with different plans are refused before anything is built: each one's proof knows its own plan only",
        "torch 2.13.0",
        _init_process_group,
    ),
)
