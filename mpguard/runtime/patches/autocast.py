"""Patches of `torch.autocast`: regions in which the script computes a part without it are named in the proof."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from mpguard.runtime import guard as guards
from mpguard.runtime.patches.patch import AnyFunction, Patch

#: The module of `torch.autocast`, and the function in it that switches autocast off around `custom_fwd(cast_inputs=)`.
AUTOCAST, CUSTOM_FWD = "torch.amp.autocast_mode", "decorate_fwd"


def _enter(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        entered = original(self)
        guard = guards.current()
        if guard is not None and guard.recorder.account.running and not _is_of_custom_fwd():
            guard.recorder.account.enter_autocast(self, inside=bool(getattr(self, "prev", False)))
        return entered

    return __enter__


def _exit(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __exit__(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None and guard.recorder.account.running:
            guard.recorder.account.leave_autocast(self)
        return original(self, *args, **kwargs)

    return __exit__


def _is_of_custom_fwd() -> bool:
    """True for the region of a function that casts its inputs: a library says so, and not the script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("mpguard."):
        frame = frame.f_back
    if frame is None:
        return False
    return frame.f_globals.get("__name__") == AUTOCAST and frame.f_code.co_name == CUSTOM_FWD


PATCHES = tuple(
    Patch(
        AUTOCAST,
        f"autocast.{method}",
        ("self",),
        "products in FP32 are as the script says where it has switched autocast off around a part",
        "torch 2.13.0",
        wrap,
    )
    for method, wrap in (("__enter__", _enter), ("__exit__", _exit))
)
