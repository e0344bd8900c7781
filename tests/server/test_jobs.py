"""The work queue of the language server: urgent work first, cancelled work never, garbage collected in pauses."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from mpguard.server import jobs as module
from mpguard.server.jobs import Jobs


def test_urgent_work_runs_first_and_cancelled_work_never() -> None:
    jobs, done = Jobs(), []
    started, proceed = threading.Event(), threading.Event()

    def first() -> str:
        started.set()
        proceed.wait(60)
        return "first"

    async def submit() -> None:
        running = asyncio.ensure_future(jobs.submit(first))
        await asyncio.to_thread(started.wait, 60)
        submitted = [
            asyncio.ensure_future(jobs.submit(lambda n=n: done.append(n), n == "typed")) for n in ("a", "b", "typed")
        ]  # type: ignore[misc]
        failing = asyncio.ensure_future(jobs.submit(lambda: 1 // 0))
        await asyncio.sleep(0)
        submitted[1].cancel()
        await asyncio.sleep(0)
        proceed.set()
        assert await running == "first"
        with pytest.raises(ZeroDivisionError):
            await failing
        await asyncio.gather(*submitted, return_exceptions=True)
        jobs.stop()

    worker = threading.Thread(target=jobs.run)
    worker.start()
    asyncio.run(submit())
    worker.join(60)
    assert done == ["typed", "a"]
    assert not worker.is_alive()


class Circle:
    """An object in a reference cycle, which only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_in_pauses_and_frozen_objects_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 0.1)
    gone, frozen_gone = threading.Event(), threading.Event()
    jobs, frozen = Jobs(), [Circle()]
    weakref.finalize(frozen[0], frozen_gone.set)

    def work() -> None:
        weakref.finalize(Circle(), gone.set)

    async def submit() -> None:
        await jobs.submit(work)
        assert await asyncio.to_thread(gone.wait, 60)
        frozen.clear()  # after the first collection, which has frozen it
        assert await asyncio.to_thread(frozen_gone.wait, 60)
        jobs.stop()

    worker = threading.Thread(target=jobs.run)
    gc.disable()
    try:
        worker.start()
        asyncio.run(submit())
        worker.join(60)
    finally:
        gc.enable()
