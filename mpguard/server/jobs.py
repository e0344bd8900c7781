"""Work for the main thread, handed over by the one that speaks with the editor.

Only in the main thread can the time that one file takes be limited, and there one check at a time is all that Python
can do; meanwhile the other thread goes on answering.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Jobs:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    async def do(self, work: Callable[[], Result]) -> Result:
        """The result of some work, or what it raises. Cancelled before its turn, it is not begun."""
        future: Future[Result] = Future()
        self._queue.put((future, work))
        return await asyncio.wrap_future(future)

    def run(self) -> None:
        """Does what is asked until `end`."""
        while (job := self._queue.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def end(self) -> None:
        self._queue.put(None)
