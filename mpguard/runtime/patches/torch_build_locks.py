"""Sign the locks of extensions' builds, so that the launcher can remove those of its workers, and report builds."""

from __future__ import annotations

import functools
import threading
from typing import Any

from mpguard.core.console import print_line
from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime.launch import build_locks
from mpguard.runtime.patches import checks

#: Seconds of a build before it is reported: one that has nothing to compile takes less.
SILENT = 5.0


@patch(
    "torch.utils.cpp_extension:_write_ninja_file_and_build_library",
    needs=("name",),
    reason="DeepSpeed compiles its operators at their first use, for minutes and without a message",
    lost="the build of an extension is not reported",
    check=checks.build,
)
def _report_build(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("name", args[0] if args else "")
        line = f"mpguard: the extension `{name}` is compiled, once on this machine; those of DeepSpeed take minutes"
        timer = threading.Timer(SILENT, print_line, [line])
        timer.daemon = True
        timer.start()
        try:
            return original(*args, **kwargs)
        finally:
            timer.cancel()

    return build


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
