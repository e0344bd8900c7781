"""How a process ends: the status that it should have, and the last word on a run that is not in force."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
from types import TracebackType
from typing import Any, NoReturn

from mpguard.core.console import print_line
from mpguard.core.errors import NotInForce
from mpguard.runtime.guard import Guard
from mpguard.runtime.messages import failure_message
from mpguard.runtime.proof.consensus import is_reporting_rank, rank


def finish(guard: Guard, status: int = 0) -> int:
    """At the end of the script, with its status: the status that the process should have.

    1 instead of 0 where the run is not in force though the script swallowed the exception, or where
    it trained and ended before it could be proven. A script that never trained is no failure.
    """
    if os.getpid() != guard.process:
        return status  # a fork of the script's
    if guard.finished:
        return status or int(guard.failure is not None)
    guard.finished = True
    failure = guard.failure
    if failure is None:
        try:
            guard.finalize(status)
        except NotInForce as error:
            failure, status = str(error), status or 1
            _report_failure(failure)
        finally:
            guard.recorder.stop()
    elif not status:
        _report_failure(failure)
    return status or int(failure is not None)


def _report_failure(failure: str) -> None:
    if rank() == 0:
        print_line(f"mpguard: {failure_message(failure)}")


def patch_os_exit(guard: Guard) -> None:
    """`os._exit` runs no exit handler; a run that is not in force must not end with 0 through it."""
    really = os._exit

    def _exit(status: int) -> None:
        really(finish(guard, status) if os.getpid() == guard.process else status)

    os._exit = _exit  # type: ignore[assignment]


class ExitHooks:
    """The end of a process that mpguard did not start: exceptions without a traceback, and the last word."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.crashed = False
        self.status, self.stepped = 0, 0

    def take_over(self) -> None:
        """Puts itself in the place of `sys.excepthook` and `sys.exit`, and comes last."""
        former, leave = sys.excepthook, sys.exit
        self.guard.spawned = multiprocessing.parent_process() is not None

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.crashed = True
            if isinstance(error, NotInForce):
                if is_reporting_rank():
                    print_line(f"mpguard: {failure_message(str(error))}")
            else:
                former(kind, error, trace)

        def exit(status: Any = None) -> NoReturn:
            self.status = 0 if status is None else status if isinstance(status, int) else 1
            self.stepped = self.guard.stepped
            leave(status)

        sys.excepthook, sys.exit = hook, exit
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        # A script that swallowed its own `sys.exit` and trained on did not leave with that.
        status = self.status if self.guard.stepped == self.stepped else 0
        if self.crashed:
            finish(self.guard, 1)
        elif finish(self.guard, status) and not status and os.getpid() == self.guard.process:
            # An exit handler cannot change the status otherwise; those that are left still run.
            atexit.unregister(self._at_exit)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def drain_gloo_threads() -> None:
    """Gives gloo's threads the interpreter once more before it ends.

    Such a thread takes the GIL to drop what belongs to a collective. If Python ends meanwhile, it ends
    the thread, and C++ the process: "terminate called without an active exception", SIGABRT, in up to
    one of five runs whose last act is a collective (torch 2.13, CPU, stock accelerate too).
    """
    if "torch.distributed" in sys.modules:
        time.sleep(0.05)
