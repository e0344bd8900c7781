"""What the watch reports: a JSONL file, lines on the terminal, accelerate's trackers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import IO, Any

from mpguard.core import watch_events
from mpguard.core.console import print_line, write_lines
from mpguard.core.errors import ConfigError
from mpguard.core.version import __version__
from mpguard.runtime import guard as guards
from mpguard.runtime.ranks import is_reporting_rank, rank, world_size
from mpguard.runtime.reporter import below_progress_bars

#: The version of the JSONL format.
FORMAT = 1

#: Seconds between two writes of steps to the file; events are written at once.
FLUSH_EVERY = 1.0

#: Steps between two values that a tracker gets.
TRACK_EVERY = 10


@dataclasses.dataclass(frozen=True)
class WatchEvent:
    """Something that happened at a step: a line of the JSONL file.

    event: its kind, such as `nonfinite`. module: the module that it concerns; None for the whole run. value: plain
    data. suggestion: what to do; None if there is nothing to do. text: the line for the terminal; empty for none.
    """

    event: str
    step: int
    module: str | None = None
    value: Any = None
    suggestion: str | None = None
    text: str = ""

    def line(self) -> dict[str, Any]:
        """Return the line of the JSONL file."""
        return {
            "event": self.event,
            "step": self.step,
            "rank": rank(),
            "module": self.module,
            "value": plain(self.value),
            "suggestion": self.suggestion,
        }


def plain(value: Any) -> Any:
    """Return a value that is valid JSON: numbers that are not finite become "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


class JsonLines:
    """The JSONL file of a run. Rank 0 writes steps and events; another rank its events, to a file with its number."""

    def __init__(self, path: str | None, level: str) -> None:
        """Use a file, which is created at the first line. Raises `ConfigError` if it exists and is another file."""
        self._path, self._level = Path(path) if path else None, level
        self._file: IO[str] | None = None
        self._flushed = time.monotonic()
        if self._path is not None and rank() == 0:
            _require_writable(self._path)

    def write_step(self, line: dict[str, Any]) -> None:
        """Write the line of a step, on rank 0."""
        if self._path is not None and rank() == 0:
            self._write(line, at_once=False)

    def write_event(self, line: dict[str, Any]) -> None:
        """Write the line of an event."""
        self._write(line, at_once=True)

    def _write(self, line: dict[str, Any], *, at_once: bool) -> None:
        if self._path is None:
            return
        if self._file is None:
            self._file = self._open(self._path)
        self._file.write(json.dumps(plain(line), allow_nan=False) + "\n")
        now = time.monotonic()
        if at_once or now - self._flushed > FLUSH_EVERY:
            self._file.flush()
            self._flushed = now

    def _open(self, path: Path) -> IO[str]:
        own = path if rank() == 0 else path.with_name(f"{path.stem}.rank{rank()}{path.suffix}")
        file = own.open("w", encoding="utf-8")
        head = {
            "event": "run", "version": FORMAT, "mpguard": __version__, "level": self._level,
            "rank": rank(), "ranks": world_size()[0], "time": time.time(),
        }  # fmt: skip
        guard = guards.current()
        if guard is not None and guard.plan.policy.fp8_emulate:
            head["emulated"] = True  # so that no reader takes its times for those of FP8
        file.write(json.dumps(head) + "\n")
        return file

    def close(self) -> None:
        """Write what is left."""
        if self._file is not None:
            self._file.close()
            self._file = self._path = None


def _require_writable(path: Path) -> None:
    """Raise `ConfigError` if a file cannot be written, or holds something else than an earlier watch."""
    try:
        if not path.exists():
            path.touch()
            path.unlink()
        elif path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                first = file.readline(4096)
            if not _is_watch_file(first):
                raise ConfigError(f"{path}: the watch cannot be written: the file exists, and is not one of a watch")
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: the watch cannot be written: {error.strerror}") from None


def _is_watch_file(first: bytes) -> bool:
    with contextlib.suppress(ValueError, AttributeError):
        return bool(json.loads(first).get("event") == "run")
    return False


class Terminal:
    """Prints events: the first ones of a kind at once, then ever fewer. It works next to progress bars."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def report(self, event: WatchEvent) -> None:
        """Print an event, unless there were many of its kind: the first three, then the 4th, 8th, 16th ... are.

        All ranks skip a step together, and so on: a rank other than 0 prints only which module of its own made NaN.
        """
        if not event.text:
            return
        self.counts[event.event] += 1
        if not is_reporting_rank() and (event.event != "nonfinite" or event.module is None):
            return
        number = self.counts[event.event]
        if number > 3 and number & (number - 1):
            return
        more = f" ({number} times so far)" if number > 3 else ""
        where = f"rank {rank()}, step {event.step}" if world_size()[0] > 1 else f"step {event.step}"
        lines = [[("mpguard watch: ", "bold yellow"), (f"{where}: {event.text}{more}", "")]]
        if event.suggestion:
            lines.append([("  ", ""), (event.suggestion, "cyan")])
        with below_progress_bars():
            write_lines(lines, sys.stderr)
            sys.stderr.flush()

    def note(self, text: str) -> None:
        """Print a line about the whole run, on rank 0, if there is one."""
        if rank() == 0 and text:
            write_lines([[("mpguard watch: ", "bold yellow"), (text, "")]], sys.stderr)

    def summarize(self, steps: int, skipped: int, bad: int = 0) -> None:
        """Print one line about the whole run, on rank 0, if something happened in it."""
        found = {kind: count for kind, count in self.counts.items() if kind != "skipped_step"}
        if rank() != 0 or not (found or skipped):
            return
        parts = [f"{skipped} skipped"] if skipped else []
        if bad > 1:
            parts.append(f"{bad} of {steps} not finite")
            found.pop("nonfinite", None)  # is reported once, not again while it lasts
        parts += [watch_events.counted(kind, count) for kind, count in sorted(found.items())]
        write_lines([[("mpguard watch: ", "bold yellow"), (f"{steps} steps: {', '.join(parts)}", "")]], sys.stderr)


class Trackers:
    """The trackers of accelerate (TensorBoard, W&B, ...) that the script has started."""

    def __init__(self) -> None:
        self._accelerator: weakref.ref[Any] | None = None
        self._lost: set[str] = set()

    def follow(self, accelerator: Any | None) -> None:
        """Log to the trackers of an `Accelerator` from here on; to none without one."""
        self._accelerator = weakref.ref(accelerator) if accelerator is not None else None

    def log_step(self, line: dict[str, Any]) -> None:
        """Log the numbers of a step, every `TRACK_EVERY` steps."""
        if line["step"] % TRACK_EVERY == 0:
            names = ("grad_norm", "loss_scale", "ms")
            self._log({f"mpguard/{name}": line[name] for name in names if line.get(name) is not None}, line["step"])

    def log_event(self, event: WatchEvent, count: int) -> None:
        """Log how many events of a kind there were."""
        if event.text:
            self._log({f"mpguard/{event.event}": count}, event.step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        accelerator = self._accelerator() if self._accelerator is not None else None
        for tracker in getattr(accelerator, "trackers", None) or ():
            if tracker.name in self._lost:
                continue
            try:
                if tracker.name == "wandb":
                    # W&B drops values of a step before its current one: these belong to the script's next commit.
                    tracker.log({**values, "mpguard/step": step}, step=None, commit=False)
                else:
                    tracker.log(values, step=step)
            except Exception as error:  # it was closed, or cannot log: that concerns neither the others nor the watch
                self._lost.add(tracker.name)
                print_line(
                    f"mpguard watch: the tracker {tracker.name} takes no values any more ({type(error).__name__}: "
                    f"{error}); the other reports continue"
                )
