"""What the benchmarks of speed share: processes that train in turns, and the times of their steps.

A worker is a process, or one per GPU, that builds its training when it is asked for the first time, and then runs a
round for each line on stdin. Its answers are lines of JSON on stdout. In turns, a busy neighbour hits all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: The line that ends a worker.
END = "end"

#: Cores on which a worker is measured.
CORES = 4

# -- in a worker -------------------------------------------------------------------------------------------------------


def serve(
    prepare: Callable[[], tuple[Mapping[str, Any], Callable[[], Any]]], end: Callable[[], Mapping[str, Any]]
) -> None:
    """Answer the parent: what `prepare` found, then what a round found for each line, at the end what `end` found.

    prepare: builds what is measured, and returns facts and a function that runs a round. The process ends at once after
    the last answer: compilers and collectives may have threads that do not end.
    """
    sys.stdin.readline()
    facts, run = prepare()
    share_cores()
    say(facts)
    for line in sys.stdin:
        if line.strip() == END:
            say(end())
            break
        say(run())
    sys.stdout.flush()
    os._exit(0)


def share_cores() -> None:
    """Let the threads of this process run on a few cores, the same ones for all workers, which take turns.

    Cores of one host do not reach a GPU equally fast: two equal processes differed by 10 % where the GPU waits for the
    host. Ranks of one worker, which run at the same time, have cores of their own.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    rank, count = int(os.environ.get("RANK", "0")), min(CORES, len(cores) // int(os.environ.get("WORLD_SIZE", "1")))
    own = cores[rank * count : (rank + 1) * count] or cores
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), own)


def say(found: Mapping[str, Any]) -> None:
    """Print an answer; of several processes of one worker the first one does."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if device() == "cuda" else "cpu"


def rows_in(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a result file, none if it does not exist."""
    found: list[dict[str, Any]] = []
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path is not None and path.exists() else found


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed_round(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Time steps with a synchronization after each (`ms`), and without (`flow`; `host`: until the last is launched)."""
    ms = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        synchronize()
        ms.append((time.perf_counter() - began) * 1e3)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    host = (time.perf_counter() - began) * 1e3 / steps
    synchronize()
    return {"ms": ms, "flow": (time.perf_counter() - began) * 1e3 / steps, "host": host}


# -- in the parent -----------------------------------------------------------------------------------------------------


class Worker:
    """A program with arguments, as one process or one per GPU. It begins when it is asked for the first time."""

    def __init__(self, name: str, words: Sequence[str], processes: int = 1) -> None:
        self.name = name
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.text: list[str] = []
        path = os.pathsep.join((str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}
        port = str(_free_port())
        self.processes = []
        for rank in range(processes):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
            if processes > 1:
                environment |= {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
            )
            self.processes.append(process)
            threading.Thread(target=self._read, args=(process, rank), daemon=True).start()

    def _read(self, process: subprocess.Popen[str], rank: int) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            (self.lines.put(line) if line.startswith("{") and rank == 0 else self.text.append(line))
        if rank == 0 or process.wait() != 0:  # the others wait for one that fails for ever
            self.lines.put(None)

    def ask(self, word: str = "", timeout: float = 150.0) -> dict[str, Any]:
        """Return the next answer. Raises `RuntimeError` if a process has ended, or is too slow."""
        self.tell(word)
        return self.answer(timeout)

    def tell(self, word: str = "") -> None:
        """Ask without waiting for the answer."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended, which the answer tells
                print(word, file=process.stdin, flush=True)

    def answer(self, timeout: float = 150.0) -> dict[str, Any]:
        """Return the next answer. Raises `RuntimeError` if a process has ended, or is too slow."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            line = None
        if line is None:
            states = [process.poll() for process in self.processes]
            ended = [state for state in states if state is not None]
            how = f"ended with status {ended[0]}" if ended else f"no answer in {timeout:.0f} s"
            self.end()
            raise RuntimeError(f"{self.name}: {how}: {''.join(self.text)[-1500:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclasses.dataclass
class Times:
    """The times of a worker's rounds."""

    ms: list[float] = dataclasses.field(default_factory=list)
    flow: list[float] = dataclasses.field(default_factory=list)
    host: list[float] = dataclasses.field(default_factory=list)

    def add(self, found: Mapping[str, Any]) -> None:
        self.ms += found["ms"]
        self.flow.append(found["flow"])
        self.host.append(found["host"])

    def row(self) -> dict[str, float]:
        return {
            "ms": statistics.median(self.ms),
            "lo": min(self.ms),
            "hi": max(self.ms),
            "flow": statistics.median(self.flow),
            "host": statistics.median(self.host),
        }


def versions(names: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of libraries; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
