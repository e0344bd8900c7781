"""The end of a process: its exit status, and the last message about a run that is not in force."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from mpguard.core.errors import NotInForce
from mpguard.core.patches import OWN, apply_own, patch
from mpguard.runtime import lost_ranks, meter, run_end
from mpguard.runtime.containment import contained, report_own_failure, without_wrappers
from mpguard.runtime.crashes import print_cause
from mpguard.runtime.guard import Guard, current
from mpguard.runtime.last_lines import print_last
from mpguard.runtime.messages import failure_message, not_in_force
from mpguard.runtime.patches import checks
from mpguard.runtime.proof import consensus, profiler
from mpguard.runtime.ranks import had_group, is_reporting_rank, is_started_by_script, rank
from mpguard.runtime.reporter import below_progress_bars


def finish(guard: Guard, status: int = 0) -> int:
    """Finish the proof at the end of the script, and return the exit status that the process should have.

    status: the script's own. It becomes 1 instead of 0 if the run is not in force although the script
    caught the exception, or if it trained and ended before it could be proven. A script that never
    trained is not a failure.
    """
    if os.getpid() != guard.process:
        return status  # a process that the script forked
    if guard.finished:
        return status or int(guard.refused is not None)
    guard.finished = True
    profiler.stop_in_this_thread()
    if guard.meter is not None:
        with contained("the measurement of the run"):
            guard.meter.write()
    error = not_in_force(guard.refused) if guard.refused is not None else None
    if guard.refusal is None:
        warned = guard.reporter.warned
        try:
            run_end.finalize(guard, status)
            if warned is not None:
                guard.reporter.report_warned(warned, alone=guard.alone)
        except NotInForce as raised:
            error, status = raised, status or 1
            print_failure(guard, error)
        except Exception as failed:
            report_own_failure("the end of the proof", failed)
        finally:
            guard.recorder.stop()
    if guard.refused is not None and error is not None and not status:
        print_failure(guard, error)
    lost_ranks.print_last_line()
    consensus.forget_store()
    return status or int(error is not None)


def leave_together(guard: Guard) -> None:
    """End this process in the middle of its script, after all ranks have come here.

    Nothing of the script runs any more, neither a `finally` block nor an atexit handler: what they would save is not
    finished. A rank that ended while another waits for it in a collective would leave that one hanging.
    """
    with contextlib.suppress(Exception):
        consensus.agree("measured", consensus.Report([]), consensus.CHECK_TIMEOUT)
    status = finish(guard)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def print_failure(guard: Guard, error: NotInForce) -> None:
    """Print a failure: on rank 0 for all, and on a rank that is alone with it."""
    if is_reporting_rank():
        with below_progress_bars():
            print_last(f"mpguard: {failure_message(error)}")
        meter.write_refusal(error.reasons)
    elif guard.alone and not consensus.is_left_to_rank_0():
        print_last(f"mpguard: rank {rank()}: {failure_message(error)}")
        meter.write_refusal(f"rank {rank()}: {error.reasons}")


@patch(
    "os:_exit",
    needs=("status",),
    reason="it skips the atexit handlers, in which a proof ends",
    lost="a run that ends by os._exit has the status of the script, even if it is not in force",
    check=checks.ends_at_once,
    part=OWN,
)
def _exit_with_proof(original: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    def _exit(status: int) -> NoReturn:
        guard = current()
        original(finish(guard, status) if guard is not None and os.getpid() == guard.process else status)

    return _exit


def patch_os_exit() -> None:
    """Patch `os._exit` so that a failed run cannot exit 0 by skipping atexit handlers."""
    apply_own(_exit_with_proof)


@patch(
    "sys:exit",
    needs=(),
    reason="an atexit handler does not get the status of the script, which decides if the run is concluded",
    lost="a run that ends by `sys.exit` with another status than 0 is concluded like one that has succeeded",
    check=checks.leaves,
    part=OWN,
)
def _exit_noting_status(original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    def exit(status: Any = None) -> NoReturn:
        if _installed is not None:
            _installed.note_status(status)
        original(status)

    return exit


_installed: ExitHooks | None = None


class ExitHooks:
    """Hooks for a process that mpguard did not start: print `NotInForce` without a traceback, set the exit status."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.crashed = False
        self.status, self.step_calls = 0, 0

    def install(self) -> None:
        """Replace `sys.excepthook`, patch `sys.exit`, and register an atexit handler."""
        global _installed
        former, _installed = sys.excepthook, self
        self.guard.spawned = is_started_by_script()

        def hook(kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
            self.crashed = True
            if isinstance(error, NotInForce):
                if self.guard.alone:
                    lost_ranks.publish(error)
                print_failure(self.guard, error)
            else:
                lost_ranks.describe(error)
                if lost_ranks.refusal():
                    return  # the collective that has failed is no cause: `finish` prints the line that names it
                former(kind, error, without_wrappers(error).__traceback__)
                print_cause(error)

        sys.excepthook = hook
        apply_own(_exit_noting_status)
        atexit.register(self._at_exit)

    def note_status(self, status: Any) -> None:
        """Keep the status that the script has given to `sys.exit`."""
        self.status = 0 if status is None else status if isinstance(status, int) else 1
        self.step_calls = self.guard.step_calls

    def _at_exit(self) -> None:
        # If optimizer steps followed `sys.exit`, the script caught the SystemExit: its status does not count.
        status = self.status if self.guard.step_calls == self.step_calls else 0
        if self.crashed:
            finish(self.guard, 1)
        elif finish(self.guard, status) and not status and os.getpid() == self.guard.process:
            # An atexit handler cannot change the status in another way. The remaining handlers still run.
            atexit.unregister(self._at_exit)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def drain_gloo_threads() -> None:
    """Release the GIL for 50 ms, so that gloo's threads can finish before the interpreter or a process group ends.

    Such a thread takes the GIL to release the objects of a collective. If Python ends meanwhile, it ends
    the thread, and C++ the process: "terminate called without an active exception", SIGABRT, in up to
    one of five runs whose last act is a collective (torch 2.13, CPU, stock accelerate too). If its process group
    was destroyed and the last object that holds it is released, that waits for the thread, with the GIL: for ever.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and had_group():
        time.sleep(0.05)
