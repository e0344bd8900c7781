"""Work for the main thread, handed over by the one that speaks with the editor.

Only in the main thread can the time that one file takes be limited, and there one check at a time is all that Python
can do; meanwhile the other thread goes on answering.
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

#: Seconds without work after which garbage is collected: facts of the last version, which refer in circles. What is
#: alive then, trees above all, is no garbage for long, and left out from there on: a collection takes 6 ms, not 250.
PAUSE = 0.02
#: And seconds after which it is looked for everywhere.
REST = 20


@dataclasses.dataclass(order=True)
class _Job:
    """work: None is the end."""

    turn: int
    number: int
    future: Future[Any] = dataclasses.field(compare=False)
    work: Callable[[], Any] | None = dataclasses.field(compare=False)


class Jobs:
    """ended: whether `run` has returned."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()

    async def do(self, work: Callable[[], Result], waits: bool = True) -> Result:
        """The result of some work, or what it raises. Cancelled before its turn, it is not begun.

        waits: somebody does; else it lets what is waited for pass.
        """
        future: Future[Result] = Future()
        self._queue.put(_Job(0 if waits else 1, next(self._numbers), future, work))
        return await asyncio.wrap_future(future)

    def run(self) -> None:
        """Does what is asked until `end`; garbage is collected when nothing is."""
        waits: list[float] = []
        while True:
            try:
                job = self._queue.get(timeout=waits[0] if waits else None)
            except queue.Empty:
                if waits.pop(0) == REST:
                    gc.unfreeze()
                gc.collect()
                gc.freeze()
                continue
            future, work = job.future, job.work
            if work is None:
                self.ended.set()
                return
            waits = [PAUSE, REST]
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def end(self) -> None:
        self._queue.put(_Job(-1, 0, Future(), None))
