"""One trial: the user's script under a candidate, in processes of its own, of which none is left at the end.

The script reads nothing from the terminal, and what it prints goes to a file. Processes are found by an environment
variable that they inherit, because torchrun's workers have process groups of their own, and because a process whose
parent has ended has another one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpguard.runtime import meter
from mpguard.runtime.launch import launcher
from mpguard.runtime.proof.verdict import IN_FORCE
from mpguard.tune.candidates import TuneCandidate
from mpguard.tune.model import OUT_OF_MEMORY, TrialResult

#: Environment variables of the trial: its number, and a folder for what the script writes.
TRIAL, OUT = "MPGUARD_TUNE_TRIAL", "MPGUARD_TUNE_OUT"

#: What an argument of the script has in place of that folder.
PLACEHOLDER = "{out}"

#: Steps of which a median is taken, at least.
FEWEST = 3

#: Seconds between two calls of `on_wait`.
WAIT = 0.5

#: Seconds that processes have to end after SIGTERM; then they are killed.
GRACE = 5.0

_MEMORY = re.compile(r"OutOfMemoryError|(CUDA|HIP) out of memory|can't allocate memory|MemoryError")
_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b")
_NO_INPUT = "EOFError: EOF when reading a line"

#: Lines of mpguard in the output of a run: with rows below, which are indented.
_PRINTED = re.compile(r"(mpguard\b|step \d+ proven|step \d+.*: (precision|not)|proven in force again|in force at step)")


class Trials:
    """Starts the trials of a tuning. folder: of all trials; each has one of its own in it.

    argv: the command line of `mpguard launch`. arguments: how many of its last words are the script's.
    """

    def __init__(
        self, folder: Path, argv: Sequence[str], arguments: int, *, warmup: int, steps: int, limit: float
    ) -> None:
        self.folder = folder
        self._head, self._arguments = argv[: len(argv) - arguments], argv[len(argv) - arguments :]
        self._warmup, self._steps, self._limit = warmup, steps, limit

    def measure(self, candidate: TuneCandidate, number: int) -> TrialResult:
        """Run the script under a candidate, and return the result."""
        folder = self.folder / f"{candidate.name.replace(' ', '-')}-{number}"
        out = folder / "out"
        out.mkdir(parents=True)
        command = [
            sys.executable, "-m", "mpguard.tune.start", json.dumps(candidate.overrides),
            "--enforce", "error", "--proof-json", str(folder / "proof.json"), *self._head,
            *(each.replace(PLACEHOLDER, str(out)) for each in self._arguments),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": compile_cache(),
            OUT: str(out),
            **meter.settings(folder, self._warmup, self._steps),
        }
        # Not in the folder of the trial: the path of a socket, which `multiprocessing` opens there, may have 107 bytes.
        with tempfile.TemporaryDirectory(prefix="mpguard-", ignore_cleanup_errors=True) as temporary:
            status = run_processes(command, {**environment, "TMPDIR": temporary}, folder / "log.txt", self._limit)
        return result(folder, status, self._warmup, self._limit)


def compile_cache() -> str:
    """Return the folder of Inductor's cache, which would be in the folder of temporary files."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()


# -- processes --------------------------------------------------------------------------------------------------------


def run_processes(
    command: list[str],
    environment: Mapping[str, str],
    log: Path,
    limit: float,
    on_wait: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a command, and return its status; None if it had to be ended after `limit` seconds. Leaves no process.

    on_wait: is called twice a second while it runs.
    """
    process: subprocess.Popen[bytes] | None = None
    marker = uuid.uuid4().hex
    end = time.monotonic() + limit
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**environment, TRIAL: marker}, start_new_session=True,
            )  # fmt: skip
        while (left := end - time.monotonic()) > 0:
            on_wait()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return launcher.shell_status(process.wait(min(left, WAIT)))
        return None
    finally:
        with _uninterrupted():
            _end(marker)
            if process is not None:
                process.wait()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore further signals: a second Ctrl-C must leave no process either."""
    former = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _end(marker: str) -> None:
    """End the processes of a trial: with SIGTERM, then by force."""
    import psutil  # type: ignore[import-untyped]  # accelerate needs it too

    for number in (signal.SIGTERM, signal.SIGKILL):
        alive: list[Any] = []
        while not alive and (found := _processes(marker)):  # one may start another while the list is made
            for each in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(number)
            _, alive = psutil.wait_procs(found, timeout=GRACE)


def _processes(marker: str) -> list[Any]:
    """Return the processes of a trial that still run: those with its marker, and their descendants."""
    import psutil

    found: dict[int, Any] = {}
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if each.environ().get(TRIAL) == marker:
                found |= {other.pid: other for other in (each, *each.children(recursive=True))}
    return [each for each in found.values() if _runs(each)]


def _runs(process: Any) -> bool:
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# -- results ----------------------------------------------------------------------------------------------------------


def result(folder: Path, status: int | None, warmup: int, limit: float) -> TrialResult:
    """Return the result of a trial that has ended. status: of its launcher; None if it took longer than `limit`."""
    text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    if status is None:
        printed = lines_of_script(text)
        last = f"; its last output: {printed[-1][:200]}" if printed else ""
        return TrialResult("failed", f"no end after {limit:g} s (--time-limit){last}")
    if refused := _refused(folder, status):
        return TrialResult("refused", refused)
    if status:
        return TrialResult("failed", error_of(lines_of_script(text), status))
    first = folder / "rank-0.json"
    if not first.exists():
        return TrialResult("failed", "the script ended without an optimizer step that mpguard can observe")
    measured = json.loads(first.read_text())
    steps = len(measured["losses"])
    dropped = min(warmup, steps // 2)
    times = measured["ms"][max(dropped - 1, 0) :]  # the first of all is the time of the second step
    times = [ms for ms in times if math.isfinite(ms)]
    if len(times) < FEWEST:
        return TrialResult("failed", f"the script ended after {steps} optimizer steps; {2 * FEWEST} are needed")
    most = max(json.loads(path.read_text())["bytes"] for path in folder.glob("rank-*.json"))
    return TrialResult("measured", "", tuple(times), tuple(measured["losses"][dropped:]), most)


def _refused(folder: Path, status: int) -> str:
    """Return why the policy of a trial is not in force, or not proven; empty if the script decided how it ended."""
    records = sorted(folder.glob(f"{meter.REFUSED}*.json"))
    recorded = str(json.loads(records[0].read_text())["reasons"]) if records else ""
    if status and not recorded:
        return ""
    try:
        proof = json.loads((folder / "proof.json").read_text())
    except (OSError, ValueError):
        return recorded
    if proof["verdict"] == IN_FORCE or (not (folder / "rank-0.json").exists() and not recorded):
        return recorded
    return "; ".join(proof["failures"]) or recorded


def lines_of_script(text: str) -> list[str]:
    """Return the lines of a log that mpguard has not printed itself, without indentation."""
    found: list[str] = []
    own = False
    for line in text.splitlines():
        own = bool(_PRINTED.match(line)) or (own and line.startswith("  "))
        if line.strip() and not own:
            found.append(line.strip())
    return found


def error_of(log: Sequence[str], status: int) -> str:
    """Return with which error a trial has ended, from the last line of its output that names one."""
    memory = next((line for line in reversed(log) if _MEMORY.search(line)), None)
    if memory is not None:
        return f"{OUT_OF_MEMORY}: {memory[:200]}"
    if status == 128 + signal.SIGKILL:
        return f"{OUT_OF_MEMORY}: a process was killed, as the host does when it has no memory left"
    named = next((line for line in reversed(log) if _ERROR.match(line)), log[-1] if log else "no output")
    reads = " (the script reads input, and tune gives it none)" if named.startswith(_NO_INPUT) else ""
    return f"exit status {status}: {named[:300]}{reads}"
