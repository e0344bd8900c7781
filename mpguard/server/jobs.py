"""A queue of work for the main thread, filled by the thread that communicates with the editor.

The time that one file takes can be limited only in the main thread, and Python runs only one check at a time anyway;
meanwhile the other thread keeps answering.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

#: Seconds without work before garbage is collected, which is mostly the facts of the last version: they contain cycles.
#: Objects that are alive then, mostly syntax trees, are frozen, so that later collections skip them: 6 ms, not 250.
PAUSE = 0.02
#: Seconds without work before frozen objects are collected too.
REST = 20


@dataclasses.dataclass(order=True)
class _Job:
    """One entry of the queue, ordered by priority and number. work: None stops the queue."""

    priority: int
    number: int
    future: Future[Any] = dataclasses.field(compare=False)
    work: Callable[[], Any] | None = dataclasses.field(compare=False)


class Jobs:
    """A queue of work. stopped: set when `run` returns."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()

    async def submit(self, work: Callable[[], Result], urgent: bool = True) -> Result:
        """Return the result of some work, or raise what it raises. If cancelled before it starts, it never runs.

        urgent: the user is waiting for the result; other work runs after all urgent work.
        """
        future: Future[Result] = Future()
        self._queue.put(_Job(0 if urgent else 1, next(self._numbers), future, work))
        return await asyncio.wrap_future(future)

    def run(self) -> None:
        """Do the submitted work until `stop`, and collect garbage in pauses."""
        delays: list[float] = []
        while True:
            try:
                job = self._queue.get(timeout=delays[0] if delays else None)
            except queue.Empty:
                if delays.pop(0) == REST:
                    gc.unfreeze()
                gc.collect()
                gc.freeze()
                continue
            future, work = job.future, job.work
            if work is None:
                self.stopped.set()
                return
            delays = [PAUSE, REST]
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def stop(self) -> None:
        """Stop `run` after the work in progress, before any that is queued."""
        self._queue.put(_Job(-1, 0, Future(), None))
