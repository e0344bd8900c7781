"""Report that a process compiles, and for how long: the first step of a compiled model may take a minute.

A later start of the same program takes most of it from torch's caches. Where one compilation takes longer than a
minute, the stacks of all threads are written to a file: they tell a slow compilation from one that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpguard.core.console import print_line
from mpguard.runtime.ranks import rank
from mpguard.runtime.stacks import write_stacks

#: Seconds of compilation before the first line; each further line comes after twice the time of the one before.
FIRST_LINE = 10.0

#: Seconds without a compilation after which the thread that prints the lines ends.
IDLE = 5.0

#: Seconds of one compilation after which the stacks of all threads are written to a file, once per process.
STACKS_AFTER = 60.0

#: Seconds between two readings of the clock by that thread.
POLL = 0.5


class CompileProgress:
    """Measure how long this process has compiled, and report it after 10, 20, 40, ... seconds.

    report: takes a line of text. It is called in a thread of its own, because the compiling one is busy. report_stacks:
    takes the line about the stacks, which each rank prints: the others wait for one that hangs. seconds: of all
    compilations that have ended. graphs: how many these are, of forward and backward passes.
    """

    def __init__(self, report: Callable[[str], None], report_stacks: Callable[[str], None] = print_line) -> None:
        self.report, self.report_stacks = report, report_stacks
        self.seconds = 0.0
        self.graphs = 0
        self._began: float | None = None
        self._next_line = FIRST_LINE
        self._wrote_stacks = False
        self._thread: threading.Thread | None = None

    def begin(self, _args: Any = None) -> None:
        """Record that a compilation begins."""
        self._began = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._report_until_idle, name="mpguard-compile", daemon=True)
            self._thread.start()

    def end(self, _args: Any = None) -> None:
        """Record that a compilation has ended."""
        if self._began is not None:
            self.seconds += time.monotonic() - self._began
            self.graphs += 1
            self._began = None

    @property
    def compiles(self) -> bool:
        """True between `begin` and `end`."""
        return self._began is not None

    def so_far(self) -> float:
        """Return the seconds of all compilations, the present one included."""
        began = self._began
        return self.seconds + (time.monotonic() - began if began is not None else 0.0)

    def _report_until_idle(self) -> None:
        idle_since: float | None = None
        while idle_since is None or time.monotonic() - idle_since < IDLE:
            time.sleep(POLL)
            if self._began is not None:
                idle_since = None
                self._report_if_due()
                self._write_stacks_if_due()
            elif idle_since is None:
                idle_since = time.monotonic()

    def _report_if_due(self) -> None:
        seconds = self.so_far()
        if seconds >= self._next_line:
            while self._next_line <= seconds:
                self._next_line *= 2
            graphs = f"{self.graphs} graph{'s' if self.graphs != 1 else ''}"
            self.report(
                f"mpguard: compiling for {seconds:.0f} s so far, {graphs} done; torch keeps them for the next start"
            )

    def _write_stacks_if_due(self) -> None:
        began = self._began
        if self._wrote_stacks or began is None or time.monotonic() - began < STACKS_AFTER:
            return
        self._wrote_stacks = True
        if path := write_stacks():
            self.report_stacks(
                f"mpguard: rank {rank()} has compiled one graph for {time.monotonic() - began:.0f} s; the stacks of "
                f"all its threads are in {path}"
            )


_progress: CompileProgress | None = None


def is_compiling() -> bool:
    """True while this process compiles, as far as it is watched."""
    return _progress is not None and _progress.compiles


def watch(report: Callable[[str], None]) -> None:
    """Report the compilations of this process from now on. A second call changes nothing."""
    global _progress  # noqa: PLW0603  torch calls back for the whole process
    if _progress is not None:
        return
    from torch._dynamo.callback import callback_handler

    _progress = CompileProgress(report)
    callback_handler.register_start_callback(_progress.begin)
    callback_handler.register_end_callback(_progress.end)
