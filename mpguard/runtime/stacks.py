"""Where a process is: the stacks of its threads in a file, and a line if one of several processes stands still.

A rank that waits for another one looks like a rank that computes, until the process group gives up after 10 minutes
(NCCL) or 30 (gloo). Before the first proof each rank reports once at which line it has been for `STANDSTILL` seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import linecache
import os
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mpguard.core.console import print_line
from mpguard.runtime.ranks import rank

#: Seconds at one place after which a rank says where it is, and seconds between two looks at it.
STANDSTILL, POLL = 60.0, 2.0


def write_stacks() -> str | None:
    """Write the stacks of all threads to a file of this rank, and return its path; None if that is not possible."""
    with contextlib.suppress(OSError):  # no room in the folder for temporary files
        handle, path = tempfile.mkstemp(prefix=f"mpguard-stacks-rank{rank()}-", suffix=".txt")
        with os.fdopen(handle, "w") as file:
            faulthandler.dump_traceback(file)
        return path
    return None


def report_standstill(
    is_over: Callable[[], bool], progress: Callable[[], object], report: Callable[[str], None] = print_line
) -> None:
    """Watch the current thread in another one, and report once if it stays at one place.

    is_over: True ends the watch. progress: returns something else after each progress of the training.
    """
    thread = threading.get_ident()

    def watch() -> None:
        since, known = time.monotonic(), None
        while not is_over():
            time.sleep(POLL)
            frame = sys._current_frames().get(thread)
            if frame is None:
                return
            found = id(frame), frame.f_lasti, progress()
            if found != known:
                since, known = time.monotonic(), found
            elif (seconds := time.monotonic() - since) >= STANDSTILL:
                report(_line(frame, seconds))
                return
            del frame  # it keeps the local variables of the program

    threading.Thread(target=watch, name="mpguard-standstill", daemon=True).start()


def _line(frame: FrameType, seconds: float) -> str:
    place, inside = script_frame(frame) or frame, ""
    if place is not frame:
        inside = f", in `{frame.f_code.co_name}` of {frame.f_globals.get('__name__', '?')}"
    file, number = place.f_code.co_filename, place.f_lineno
    path = write_stacks()
    stacks = f"; the stacks of all its threads are in {path}" if path else ""
    return (
        f"mpguard: rank {rank()} has been at one place for {seconds:.0f} s, before its first step was proven: "
        f"{relative(file)}:{number} (`{linecache.getline(file, number).strip()}`){inside}. Ranks that wait for each "
        f"other for ever are at different places{stacks}"
    )


def script_frame(innermost: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code; None if there is none."""
    frame = innermost
    while frame is not None and not is_of_script(frame):
        frame = frame.f_back
    return frame


def is_of_script(frame: FrameType) -> bool:
    """True if the code of a frame is neither mpguard's own nor in an installed package."""
    own = frame.f_globals.get("__name__", "").startswith("mpguard.")
    return not own and not is_installed(frame.f_code.co_filename)


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return paths["stdlib"], paths["purelib"], paths["platlib"], "<"


def is_installed(path: str) -> bool:
    """True if a file of code is not of the script: it is in the standard library or an installed package, or generated.

    Packages may be in another environment's folder: that of a virtual environment's base, a folder in PYTHONPATH.
    """
    return path.startswith(_installed()) or not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def relative(path: str) -> str:
    """Return a path relative to the current folder, if it is in there."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
