"""Work of the language server: one thing at a time, what is waited for first, and what is cancelled never."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from mpguard.server import jobs as module
from mpguard.server.jobs import Jobs


def test_what_is_waited_for_comes_first_and_what_is_cancelled_never() -> None:
    jobs, done = Jobs(), []
    started, go_on = threading.Event(), threading.Event()

    def first() -> str:
        started.set()
        go_on.wait(60)
        return "first"

    async def ask() -> None:
        running = asyncio.ensure_future(jobs.do(first))
        await asyncio.to_thread(started.wait, 60)
        asked = [asyncio.ensure_future(jobs.do(lambda n=n: done.append(n), n == "typed")) for n in ("a", "b", "typed")]  # type: ignore[misc]
        failing = asyncio.ensure_future(jobs.do(lambda: 1 // 0))
        await asyncio.sleep(0)
        asked[1].cancel()
        await asyncio.sleep(0)
        go_on.set()
        assert await running == "first"
        with pytest.raises(ZeroDivisionError):
            await failing
        await asyncio.gather(*asked, return_exceptions=True)
        jobs.end()

    worker = threading.Thread(target=jobs.run)
    worker.start()
    asyncio.run(ask())
    worker.join(60)
    assert done == ["typed", "a"]
    assert not worker.is_alive()


class Circle:
    """Garbage that only the collector finds, once nobody else knows it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_in_pauses_and_later_what_was_none_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 0.1)
    gone, kept_gone = threading.Event(), threading.Event()
    jobs, kept = Jobs(), [Circle()]
    weakref.finalize(kept[0], kept_gone.set)

    def work() -> None:
        weakref.finalize(Circle(), gone.set)

    async def ask() -> None:
        await jobs.do(work)
        assert await asyncio.to_thread(gone.wait, 60)
        kept.clear()  # too late for the first collection, which took it for lasting
        assert await asyncio.to_thread(kept_gone.wait, 60)
        jobs.end()

    worker = threading.Thread(target=jobs.run)
    gc.disable()
    try:
        worker.start()
        asyncio.run(ask())
        worker.join(60)
    finally:
        gc.enable()
        gc.unfreeze()
