"""Work of the language server: one thing at a time, what is waited for first, and what is cancelled never."""

from __future__ import annotations

import asyncio
import threading

import pytest

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
