"""Sign the locks of extensions' builds, so that the launcher can remove those of its workers."""

from __future__ import annotations

import functools
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime.launch import build_locks
from mpguard.runtime.patches import checks


@patch(
    "torch.utils.file_baton:FileBaton.try_acquire",
    needs=("self",),
    reason="the lock of a build that was killed stops every later run: the launcher removes those of its workers",
    lost="the lock of an extension's build that was killed stops later runs",
    check=checks.build_lock,
)
def _try_acquire(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def try_acquire(self: Any) -> Any:
        acquired = original(self)
        if acquired:
            build_locks.sign(self.lock_file_path)
        return acquired

    return try_acquire
