"""Record that an operator whose result selective activation checkpointing has kept is not computed again."""

from __future__ import annotations

import functools
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks
from mpguard.runtime.proof import trace


@patch(
    "torch.utils.checkpoint:_CachedTorchDispatchMode.__torch_dispatch__",
    needs=("func", "args"),
    reason="an operator whose result selective checkpointing has kept multiplies nothing in the backward pass",
    lost="what selective checkpointing has kept counts as a kernel that could not be observed",
    check=checks.selective_checkpointing,
)
def _from_cache(original: AnyFunction) -> AnyFunction:
    """Open a range around what takes the results of operators from the cache, or computes them again."""

    @functools.wraps(original)
    def __torch_dispatch__(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.recorder.account.running:
            return original(self, *args, **kwargs)
        with trace.from_cache():
            return original(self, *args, **kwargs)

    return __torch_dispatch__
