"""A limit on the time that one file may take.

Rules and facts take linear time, or have a budget after which a value is unknown. This limit is for what remains:
code that was generated to be slow, and cases that have not been foreseen.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

#: Seconds of CPU time for one file. The largest files written by hand take 3.
SECONDS: float = 20


class TimeoutExceeded(BaseException):
    """The time is over. Not an `Exception`, so that no handler on the way catches it."""


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Raise `TimeoutExceeded` when the block has used `SECONDS` of CPU time.

    CPU time, so that a busy machine reports the same findings. There is no limit outside the main thread, and where the
    system has no such timer (Windows).
    """
    if not hasattr(signal, "SIGVTALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: object) -> None:
        raise TimeoutExceeded

    before = signal.signal(signal.SIGVTALRM, over)
    # Repeated each second: in a `__del__` or a callback of C code, Python discards the exception.
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
