"""A limit on the time that one file may take.

Rules and facts are made to be linear, and where they are not, budgets that count end in "unknown". What is left
over is caught here: code that was generated to be slow, or that nobody thought of.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

#: Seconds of computing for one file. The largest real files take 3; this is for what nobody wrote by hand.
SECONDS: float = 20


class TimeoutExceeded(BaseException):
    """The time is over. No Exception: nothing on the way may take it for its own."""


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Raises `TooLong` when the block has computed for `SECONDS`.

    Computing alone counts, so that a busy machine finds the same. Without a limit outside the main thread, and where
    the system has no such timer (Windows).
    """
    if not hasattr(signal, "SIGVTALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: object) -> None:
        raise TimeoutExceeded

    before = signal.signal(signal.SIGVTALRM, over)
    # Again each second: in a `__del__` or a callback of C code Python swallows what is raised.
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
