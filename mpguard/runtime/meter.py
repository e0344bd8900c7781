"""`Meter`: the time, the loss and the memory of each optimizer step, in a run that `mpguard tune` has started.

Steps are counted where the proof observes them: at the end of an optimizer's step, of an engine's, and where a
GradScaler skips one. On CUDA each step leaves an event on the stream, so that nothing waits for the device but the
borders of what is timed. After the last step all ranks write what they have measured, and end together.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpguard.runtime.ranks import rank

#: Environment variable: what to measure, as JSON, see `Meter`.
TUNE = "MPGUARD_TUNE"

#: How the names of the files of `write_refusal` begin.
REFUSED = "refused-"


def settings(folder: Path, warmup: int, steps: int) -> dict[str, str]:
    """Return the environment variables with which a run is measured. See `Meter`."""
    return {TUNE: json.dumps({"folder": str(folder), "warmup": warmup, "steps": steps})}


def write_refusal(reasons: str, place: str = "") -> None:
    """Write why this process is refused, or cannot start, for the trial of a tuning that it is a part of, if any.

    place: of the process; by default its rank.
    """
    text = os.environ.get(TUNE)
    if text:
        path = Path(json.loads(text)["folder"]) / f"{REFUSED}{place or rank()}.json"
        with contextlib.suppress(OSError):  # the refusal is printed, too
            path.write_text(json.dumps({"reasons": reasons}))


class Meter:
    """Measures the steps of the optimizer that steps first, or, if that no longer exists, of the next one.

    folder: each rank writes `rank-N.json` there. warmup: steps before those that are timed. steps: how many are timed.
    stop: ends this process after the last step.
    """

    def __init__(self, folder: str, warmup: int, steps: int, stop: Callable[[], None]) -> None:
        self.folder = Path(folder)
        self.warmup, self.last = warmup, warmup + steps
        self._stop = stop
        self._optimizer: weakref.ref[Any] | None = None
        self._stamps: list[Any] = []
        self._losses: list[Any] = []  # of each step, on its device; None if it was not seen
        self._roots: list[Any] = []  # of the backward passes since the last step
        self._unscaled: Any = None
        self._written = False

    @classmethod
    def from_environment(cls, stop: Callable[[], None]) -> Meter | None:
        """Return the meter of this process; None if the run is not to be measured."""
        text = os.environ.get(TUNE)
        return cls(**json.loads(text), stop=stop) if text else None

    def record_unscaled(self, loss: Any) -> None:
        """Record a loss before a GradScaler multiplies it."""
        self._unscaled = _scalar(loss)

    def record_loss(self, roots: Any, *, scaled: bool) -> None:
        """Record the loss that a backward pass begins with. scaled: True if an engine may have multiplied it."""
        value = self._unscaled if self._unscaled is not None else None if scaled else _scalar(roots)
        self._unscaled = None
        if value is not None:
            self._roots.append(value)

    def step(self, optimizer: Any) -> None:
        """Record the end of a step, also of one that was skipped. After the last one this process ends."""
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer or self._written:
            return
        count = len(self._stamps) + 1
        if count in (self.warmup, self.last):
            _synchronize()
        self._stamps.append(_stamp())
        self._losses.append(sum(self._roots) / len(self._roots) if self._roots else None)
        self._roots.clear()
        if count == self.last:
            self.write()
            self._stop()

    def write(self) -> None:
        """Write what was measured, once. Of an incomplete run too: the script may have fewer steps."""
        if self._written or not self._stamps:
            return
        self._written = True
        _synchronize()
        measured = {
            "ms": [_milliseconds(*pair) for pair in zip(self._stamps, self._stamps[1:], strict=False)],
            "losses": [None if loss is None else float(loss) for loss in self._losses],
            "bytes": _peak_memory(),
        }
        path = self.folder / f"rank-{rank()}.json"
        path.with_suffix(".part").write_text(json.dumps(measured))
        path.with_suffix(".part").replace(path)


def _scalar(value: Any) -> Any:
    """Return a copy of a loss, without a gradient; None for anything but one number."""
    import torch

    found = value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        return None
    return found.detach().float().reshape(()).clone()  # CUDA graphs write the next loss to the same memory


def _on_cuda() -> bool:
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())


def _synchronize() -> None:
    if _on_cuda():
        import torch

        torch.cuda.synchronize()


def _stamp() -> Any:
    """Return a moment: an event on the current stream, without a GPU the time."""
    if not _on_cuda():
        return time.perf_counter()
    import torch

    cuda: Any = torch.cuda
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begin: Any, end: Any) -> float:
    """Return the milliseconds between two moments. The events of a device must have happened."""
    if isinstance(begin, float) or isinstance(end, float):
        return float((end - begin) * 1e3) if isinstance(begin, float) and isinstance(end, float) else float("nan")
    return float(begin.elapsed_time(end))


def _peak_memory() -> int:
    """Return the bytes that tensors have taken at most on this rank's GPU; without a GPU, those of this process."""
    if _on_cuda():
        import torch

        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
