"""Forked workers: many files at once, and a crash of the parser affects only its file.

Workers are forked after everything is imported: 10 ms, where another import of libcst would take
500. They get indices through a pipe and return pickled results; the tasks themselves are in their
memory already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import pickle
import selectors
import signal
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")
OnProgress = Callable[[int, int], None]

#: Fewer tasks than this run without a fork.
FEW = 9
#: New objects, in all workers together and in each, after which the garbage collector runs: a million take 100 MiB,
#: and half a second to collect.
_MOST_OBJECTS, _MOST_OF_ONE = 6_000_000, 3_000_000
_HEADER = struct.Struct("=Q")
#: Small files are sent in batches: a message costs as much as the check of one.
_BATCH_WEIGHT, _BATCH_LENGTH = 64 << 10, 32


def available() -> int:
    """Return the number of CPUs that this process may use."""
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(
    tasks: Sequence[Task],
    work: Callable[[Task], Result],
    on_crash: Callable[[Task, str], Result],
    weight: Callable[[Task], int],
    jobs: int,
    *,
    on_progress: OnProgress | None = None,
) -> list[Result]:
    """Return the result of `work` for every task, in the order of the tasks; the heaviest start first.

    on_crash: returns the result for a task whose worker was killed by a signal or exited; the others continue.
    on_progress: called now and then with the number of tasks that are done, and of all.
    `work` must not raise. KeyboardInterrupt ends all workers.
    """
    if jobs < 2 or len(tasks) < FEW or not hasattr(os, "fork"):
        results = []
        with _rare_collections(1) as collect:
            for task in tasks:
                results.append(work(task))
                collect()
                if on_progress is not None:
                    on_progress(len(results), len(tasks))
        return results
    return _Pool(tasks, work, on_crash, weight, jobs, on_progress=on_progress).run()


@contextlib.contextmanager
def _rare_collections(jobs: int) -> Iterator[Callable[[], None]]:
    """Run the garbage collector between tasks only, after many objects: trees are many objects and little garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield functools.partial(_collect, min(_MOST_OBJECTS // jobs, _MOST_OF_ONE))
    finally:
        if enabled:
            gc.enable()


def _collect(most: int) -> None:
    if gc.get_count()[0] > most:
        gc.collect()


@dataclasses.dataclass
class _Worker:
    pid: int
    tasks: int
    results: int
    batch: list[int]
    received: bytearray


class _Pool:
    def __init__(
        self,
        tasks: Sequence[Any],
        work: Callable[[Any], Any],
        on_crash: Callable[[Any, str], Any],
        weight: Callable[[Any], int],
        jobs: int,
        *,
        on_progress: OnProgress | None,
    ) -> None:
        self._tasks, self._work, self._on_crash = tasks, work, on_crash
        self._jobs, self._on_progress = jobs, on_progress
        self._results: dict[int, Any] = {}
        self._workers: list[_Worker] = []
        self._queue = deque(self._batches(weight))

    def _batches(self, weight: Callable[[Any], int]) -> list[list[int]]:
        """Return the indices of the tasks, the heaviest first, in batches."""
        batches: list[list[int]] = []
        total = _BATCH_WEIGHT
        longest = min(_BATCH_LENGTH, 1 + len(self._tasks) // (4 * self._jobs))
        for index in sorted(range(len(self._tasks)), key=lambda i: -weight(self._tasks[i])):
            if total >= _BATCH_WEIGHT or len(batches[-1]) >= longest:
                batches.append([])
                total = 0
            batches[-1].append(index)
            total += weight(self._tasks[index])
        return batches

    def run(self) -> list[Any]:
        try:
            with selectors.DefaultSelector() as selector:
                for _ in range(min(self._jobs, len(self._queue))):
                    self._start(selector)
                while self._workers:
                    for key, _ in selector.select():
                        self._receive(key.data, selector)
        finally:
            self._end()
        return [self._results[index] for index in range(len(self._tasks))]

    def _start(self, selector: selectors.BaseSelector) -> None:
        """Fork a worker."""
        sys.stdout.flush()
        sys.stderr.flush()
        task_out, task_in = os.pipe()
        result_out, result_in = os.pipe()
        pid = os.fork()
        if pid == 0:
            # Otherwise the pipes of the other workers would stay open after the parent has ended.
            others = [end for other in self._workers for end in (other.tasks, other.results) if end >= 0]
            self._worker_main(task_out, result_in, (task_in, result_out, *others))
        os.close(task_out)
        os.close(result_in)
        worker = _Worker(pid, task_in, result_out, [], bytearray())
        self._workers.append(worker)
        selector.register(result_out, selectors.EVENT_READ, worker)
        self._feed(worker)

    def _feed(self, worker: _Worker) -> None:
        """Send a worker its next batch, or close its pipe."""
        worker.batch = self._queue.popleft() if self._queue else []
        if worker.batch:
            with contextlib.suppress(BrokenPipeError):  # the other pipe reports its end
                _send(worker.tasks, worker.batch)
        else:
            os.close(worker.tasks)
            worker.tasks = -1

    def _receive(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        """Read what a worker has sent; replace it if it has ended before its batch was done."""
        chunk = os.read(worker.results, 1 << 20)
        if chunk:
            worker.received += chunk
            if len(worker.received) < _HEADER.size:
                return
            (length,) = _HEADER.unpack_from(worker.received)
            if len(worker.received) >= _HEADER.size + length:
                self._results.update(pickle.loads(worker.received[_HEADER.size :]))
                worker.received.clear()
                self._feed(worker)
                if self._on_progress is not None:
                    self._on_progress(len(self._results), len(self._tasks))
            return
        selector.unregister(worker.results)
        how = self._remove(worker)
        if len(worker.batch) == 1:
            self._results[worker.batch[0]] = self._on_crash(self._tasks[worker.batch[0]], how)
        elif worker.batch:  # one of them caused it: repeat each alone
            self._queue.extendleft([index] for index in worker.batch)
        if self._queue and worker.batch:
            self._start(selector)

    def _remove(self, worker: _Worker) -> str:
        """Remove a worker that has ended; return how it ended."""
        self._workers.remove(worker)
        os.close(worker.results)
        if worker.tasks >= 0:
            os.close(worker.tasks)
        _, status = os.waitpid(worker.pid, 0)
        if os.WIFSIGNALED(status):
            return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"exited with status {os.waitstatus_to_exitcode(status)}"

    def _end(self) -> None:
        """Kill the workers that are left."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        while self._workers:
            self._remove(self._workers[-1])

    def _worker_main(self, tasks: int, results: int, unused: Iterable[int]) -> None:
        """Run the pipe's tasks in the child, and exit. Never returns or raises: the child would act as a parent."""
        status = 1
        try:
            for end in unused:
                os.close(end)
            # Ctrl-C reaches the whole process group: end without a traceback, the parent reports it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            gc.freeze()
            with os.fdopen(tasks, "rb") as inbox, _rare_collections(self._jobs) as collect:
                while header := inbox.read(_HEADER.size):
                    batch: list[int] = pickle.loads(inbox.read(_HEADER.unpack(header)[0]))
                    _send(results, [(index, self._work(self._tasks[index])) for index in batch])
                    collect()
            status = 0
        except BrokenPipeError:
            pass  # the parent has ended
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)


def _send(pipe: int, message: Any) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    view = memoryview(_HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(pipe, view) :]
