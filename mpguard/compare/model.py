"""Plain data of a comparison: a run as it was logged, the verdict on it, and the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

#: A run that reaches less of the baseline's steps is neither the same nor different: what counts is the end.
MIN_COVERAGE = 0.9
#: What the watch writes of FP8 layers: a number of the layer that loses most, by its name there.
FP8_COLUMNS = ("snr", "underflow", "saturated")
VerdictKind = Literal["same", "different", "diverged", "inconclusive"]


@dataclasses.dataclass(frozen=True)
class LoggedEvent:
    """Something that the run's log reports at a step: an overflow, a skipped step, a restart."""

    kind: str
    step: int | None
    text: str


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The log of one run: step -> value for each series, and what the reader has to report.

    Attributes:
        source: The format: watch, jsonl, tensorboard, trainer_state, wandb or csv.
        ms: Milliseconds of a step, by step.
        memory: The most bytes of GPU memory, if the log has them.
        fp8: Of the watch: what the FP8 layers lose, of the layer with most, by `FP8_COLUMNS`.
        notes: What was left out while reading, and why.
    """

    name: str
    path: Path
    source: str
    loss: Mapping[int, float]
    grad_norm: Mapping[int, float] = dataclasses.field(default_factory=dict)
    loss_scale: Mapping[int, float] = dataclasses.field(default_factory=dict)
    ms: Mapping[int, float] = dataclasses.field(default_factory=dict)
    memory: int | None = None
    fp8: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)
    events: tuple[LoggedEvent, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Margin:
    """The largest difference that still counts as the same: a share of the baseline's loss, or in units of the loss."""

    value: float = 0.005
    relative: bool = True

    def shown(self, value: float) -> str:
        """Return a difference as a reader wants it: per cent, or units of the loss."""
        return f"{round(value * 100, 4):+.3g} %" if self.relative else f"{value:+.4g}"

    def __str__(self) -> str:
        return f"{self.value * 100:g} %" if self.relative else f"{self.value:g}"


@dataclasses.dataclass(frozen=True)
class RunVerdict:
    """The verdict on a run, or on an arm of several runs with different seeds.

    Attributes:
        difference: Mean loss minus that of the baseline; a fraction of the baseline's if the margin is relative.
        interval: Where the difference lies: 90 % for a single run, wider if several are tested (Holm).
        needed: What an inconclusive comparison lacks: {"steps": N} or {"runs": N}.
        window: The first and the last step that were compared.
        coverage: How far the run goes: the share of the baseline's steps, from the first one to the last common one.
        at_end: Where the verdict is about the end of the run: the difference there, in words.
        spikes: First and last steps of the spikes, and of losses that are not finite and pass: left out of the test.
        compared: The logs that were compared, where they are not those that were read: on other steps, or averaged.
    """

    name: str
    verdict: VerdictKind
    difference: float | None
    interval: tuple[float, float] | None
    method: str
    reason: str
    needed: Mapping[str, int] | None = None
    window: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    coverage: float | None = None
    at_end: str | None = None
    spikes: tuple[tuple[int, int], ...] = ()
    compared: tuple[tuple[RunLog, ...], tuple[RunLog, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The report: a verdict for each run, or arm of runs, against the baseline."""

    baseline: str
    margin: Margin
    verdicts: tuple[RunVerdict, ...]
    arms: Mapping[str, tuple[RunLog, ...]]

    @property
    def all_same(self) -> bool:
        return all(each.verdict == "same" for each in self.verdicts)

    def title(self) -> str:
        """Return the verdict on one run as a sentence; on several, how many got which."""
        if len(self.verdicts) == 1:
            return self.sentence(self.verdicts[0])
        kinds = [each.verdict for each in self.verdicts]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return f"{len(kinds)} runs against {self.baseline}: {counts}"

    def sentence(self, verdict: RunVerdict) -> str:
        """Return a verdict as a sentence: "fp8 trains like bf16 (loss +0.02 %, within ±0.5 %), 3 seeds"."""
        margin, number = self.margin, len(self.arms[verdict.name])
        by = f"loss {margin.shown(verdict.difference)}" if verdict.difference is not None else ""
        seeds = f", {number} seeds" if number > 1 else ""
        if verdict.verdict == "same":
            found = "has the same losses as" if verdict.method == "equal losses" else "trains like"
            return f"{verdict.name} {found} {self.baseline} ({by}, within ±{margin}){seeds}{_after(verdict.spikes)}"
        if verdict.verdict == "different":
            found = "worse" if (verdict.difference or 0.0) > 0 else "better"
            if verdict.at_end is not None:
                return f"{verdict.name} ends {found} than {self.baseline} ({verdict.at_end}){seeds}"
            return f"{verdict.name} trains {found} than {self.baseline} ({by}, outside of ±{margin}){seeds}"
        if verdict.verdict == "diverged":
            return f"{verdict.name} diverged: {verdict.reason}"
        if verdict.coverage is not None and verdict.coverage < MIN_COVERAGE:
            until = f" up to step {verdict.window[1]}" if verdict.window else ""
            return f"{verdict.name} was compared with {self.baseline} only{until} ({verdict.coverage:.0%} of its steps)"
        return f"{verdict.name} against {self.baseline} is inconclusive ({by or 'nothing to compare'})"

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--format json` prints."""
        return {
            "version": 1,
            "baseline": self.baseline,
            "margin": {"value": self.margin.value, "relative": self.margin.relative},
            "runs": [self._run_as_json(each) for each in self.verdicts],
        }

    def _run_as_json(self, verdict: RunVerdict) -> dict[str, Any]:
        logs = self.arms[verdict.name]
        return {
            "name": verdict.name,
            "verdict": verdict.verdict,
            "difference": verdict.difference,
            "interval": None if verdict.interval is None else list(verdict.interval),
            "method": verdict.method,
            "needed": None if verdict.needed is None else dict(verdict.needed),
            "reason": verdict.reason,
            "sentence": self.sentence(verdict),
            "coverage": verdict.coverage,
            "spikes": [list(each) for each in verdict.spikes],
            "window": None if verdict.window is None else list(verdict.window),
            "ms_per_step": median_of([value for log in logs for value in log.ms.values()]),
            "memory_bytes": max((log.memory for log in logs if log.memory is not None), default=None),
            "events": count_events(logs),
            "logs": [{"path": str(log.path), "source": log.source, "notes": list(log.notes)} for log in logs],
            "notes": list(verdict.notes),
        }


def _after(spikes: Sequence[tuple[int, int]]) -> str:
    """Return what a sentence says of spikes: ", after a spike at steps 701 to 760"."""
    if not spikes:
        return ""
    first, last = spikes[0]
    at = f"steps {first} to {last}" if first < last else f"step {first}"
    return f", after {'a spike' if len(spikes) == 1 else f'{len(spikes)} spikes, the first'} at {at}"


def count_events(logs: tuple[RunLog, ...]) -> dict[str, int]:
    """Return how often the logs report each kind of event."""
    counted: dict[str, int] = {}
    for log in logs:
        for event in log.events:
            counted[event.kind] = counted.get(event.kind, 0) + 1
    return counted


def median_of(values: list[float]) -> float | None:
    """Return the median of the finite values; None if there is none."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else None
