"""Signals to a launcher: they end its workers, and a launcher that still waits for another node.

While torchelastic waits for the other nodes, the main thread may be in C++ for minutes, where no handler of Python
runs. A thread that reads what `signal.set_wakeup_fd` writes learns of each signal at once.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from mpguard.core.console import print_line

#: Seconds that workers have to end after a signal; then they are killed.
GRACE = 10.0

#: Seconds that the main thread has to react to a signal while there are no workers; then this process ends.
REACTION = 2.0

#: The signals that end a launch.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signalled(BaseException):
    """Raised by the signal handler in the launcher. number: the signal."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `Signalled`, so that they end the workers too.

    Ctrl-C reaches the workers by itself. torchelastic installs its own handlers for the workers that it starts.
    """

    def handler(number: int, _frame: FrameType | None) -> None:
        _hurry_on_signals(_Hurry())  # only the first signal is raised
        raise Signalled(number)

    former = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    former[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for number, previous in former.items():
            signal.signal(number, previous)


@dataclasses.dataclass
class _Hurry:
    """asked: True once a further signal has arrived while the workers are being ended."""

    asked: bool = False


def _hurry_on_signals(hurry: _Hurry) -> None:
    """Raise nothing at further signals: they only end the wait for the workers."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        hurry.asked = True

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def end_workers(number: int) -> int:
    """Send a signal to the workers, wait until they have ended, and return the status 128 + the signal.

    A further signal ends the wait: workers that still run are killed.
    """
    import psutil  # type: ignore[import-untyped]  # accelerate needs it too

    hurry = _Hurry()
    _hurry_on_signals(hurry)
    workers = psutil.Process().children(recursive=True)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(number)
    deadline = time.monotonic() + GRACE
    while workers and not hurry.asked and time.monotonic() < deadline:
        _, workers = psutil.wait_procs(workers, timeout=0.1)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(workers, timeout=GRACE)
    return 128 + number


# -- a launcher that waits for another node ------------------------------------------------------


def end_what_waits() -> socket.socket:
    """End this process soon after a signal if it has no workers by then. Returns the socket that signals write to.

    Call it in the main thread. A handler that somebody else has installed for the wakeup is replaced.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_read_signals, args=(reader,), name="mpguard-signals", daemon=True).start()
    _writers.append(writer)
    return writer


@contextlib.contextmanager
def ending_what_waits() -> Iterator[None]:
    """Do what `end_what_waits` does until the block ends."""
    writer = end_what_waits()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        _writers.remove(writer)
        writer.close()


#: What signals write to: the objects must live as long as signals are read.
_writers: list[socket.socket] = []


def _read_signals(reader: socket.socket) -> None:
    """Read the numbers of signals until the other end is closed."""
    with reader:
        while received := reader.recv(1):
            if received[0] not in ENDING:
                continue
            time.sleep(REACTION)
            if not _is_closed(reader) and not _has_workers():
                _end_at_once(received[0])


def _is_closed(reader: socket.socket) -> bool:
    """True if nothing is going to be written any more: the launch has ended meanwhile."""
    try:
        return reader.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _has_workers() -> bool:
    import psutil

    return bool(psutil.Process().children())


def _end_at_once(number: int) -> None:
    """End this process with the status of a signal. The main thread waits in C++, and can do nothing any more."""
    name = signal.Signals(number).name
    print_line(f"mpguard: ended by {name} while no process of this node ran: it waited for the other nodes")
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + number)
