"""Record the regions of `torch.autocast`, and where the script switches it off around a part: the proof names it."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks

#: The module of `torch.autocast`, and the function in it that switches autocast off around `custom_fwd(cast_inputs=)`.
AUTOCAST, CUSTOM_FWD = "torch.amp.autocast_mode", "decorate_fwd"


@patch(
    "torch.amp.autocast_mode:autocast.__enter__",
    needs=("self",),
    reason="where the script has switched autocast off, its matmuls are in FP32 on purpose",
    lost="a part that the script computes in FP32 on purpose is not named",
    check=checks.autocast,
)
def _enter(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        entered = original(self)
        guard = guards.current()
        if guard is None:
            return entered
        region = str(self.device), str(self.fast_dtype), bool(self._enabled)
        recorded = guard.recorder.account.running
        if (recorded or region not in guard.regions) and not _is_of_custom_fwd():
            guard.regions.add(region)
            if recorded:
                guard.recorder.account.enter_autocast(self, inside=bool(getattr(self, "prev", False)))
        return entered

    return __enter__


@patch(
    "torch.amp.autocast_mode:autocast.__exit__",
    needs=("self",),
    reason="where the script has switched autocast off, its matmuls are in FP32 on purpose",
    lost="a part that the script computes in FP32 on purpose is not named",
    check=checks.autocast,
)
def _exit(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __exit__(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None and guard.recorder.account.running:
            guard.recorder.account.leave_autocast(self)
        return original(self, *args, **kwargs)

    return __exit__


def _is_of_custom_fwd() -> bool:
    """True for a region that `custom_fwd(cast_inputs=...)` opens: a library asks for it, not the script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("mpguard."):
        frame = frame.f_back
    if frame is None:
        return False
    return frame.f_globals.get("__name__") == AUTOCAST and frame.f_code.co_name == CUSTOM_FWD
