"""What `mpguard tune` has found: the trials of each candidate, their step time, and the winner."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

from mpguard.tune.candidates import TuneCandidate

State = Literal["measured", "refused", "failed"]

#: The beginning of the reason of a trial that needs more memory than there is.
OUT_OF_MEMORY = "out of memory"

#: Two runs of one program differ by this share, as a standard deviation, even if neither shows it by itself: memory is
#: laid out differently, other kernels are chosen, the device is warmer.
RUN_TO_RUN = 0.005

#: A difference that is smaller is none.
EQUAL = 0.01

#: A loss this far above that of BF16 is broken, unless the steps themselves differ more. So few steps show no more.
BROKEN = 0.05


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a step in milliseconds, with its 95 % interval."""

    ms: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """What one start of a candidate has given.

    reason: why it has no figures. ms: of each step that was timed. losses: of the same steps; None if not seen. bytes:
    the most memory on a rank.
    """

    state: State
    reason: str = ""
    ms: tuple[float, ...] = ()
    losses: tuple[float | None, ...] = ()
    bytes: int | None = None


@dataclasses.dataclass(eq=False)
class TuneRow:
    """A candidate with its trials. note: what is to be known of a candidate that was measured, or why it was not."""

    candidate: TuneCandidate
    trials: list[TrialResult] = dataclasses.field(default_factory=list)
    note: str = ""

    @property
    def state(self) -> State:
        """The state of the last trial: a candidate that failed once is no winner."""
        return self.trials[-1].state if self.trials else "refused"

    @property
    def measured(self) -> bool:
        return self.state == "measured"

    @property
    def reason(self) -> str:
        return (self.trials[-1].reason if self.trials else self.candidate.refused) or self.note

    @property
    def time(self) -> StepTime | None:
        """The median over all trials that were measured; None without one."""
        return step_time([trial.ms for trial in self.trials if trial.state == "measured"])

    @property
    def bytes(self) -> int | None:
        return max((trial.bytes for trial in self.trials if trial.bytes is not None), default=None)

    @property
    def losses(self) -> list[float] | None:
        """The losses of the first trial's steps; None if one was not seen."""
        found = [loss for trial in self.trials[:1] for loss in trial.losses]
        return None if None in found or not found else [loss for loss in found if loss is not None]


def step_time(trials: Sequence[Sequence[float]]) -> StepTime | None:
    """Return the median over the trials of the median of their steps, with its interval.

    The standard error has the scatter of the steps, as the median absolute deviation, and that between trials.
    """
    medians = [statistics.median(ms) for ms in trials if ms]
    if not medians:
        return None
    center = statistics.median(medians)
    within = statistics.fmean([_error_of_median(ms) ** 2 for ms in trials if ms])
    between = max(statistics.stdev(medians) if len(medians) > 1 else 0.0, RUN_TO_RUN * center)
    half = 1.96 * math.sqrt((within + between**2) / len(medians))
    return StepTime(center, max(center - half, 0.0), center + half)


def _error_of_median(values: Sequence[float]) -> float:
    center = statistics.median(values)
    scatter = 1.4826 * statistics.median([abs(value - center) for value in values])
    return 1.2533 * scatter / math.sqrt(len(values))


def loss_gap(row: TuneRow, baseline: TuneRow | None) -> float | None:
    """Return how far the loss is above that of the baseline, as a share of it; None if it is not known."""
    own, other = row.losses, baseline.losses if baseline is not None else None
    if own is None or other is None:
        return None
    count = min(len(own), len(other))
    reference = statistics.fmean(other[:count])
    gap = (statistics.fmean(own[:count]) - reference) / abs(reference) if reference else math.nan
    return gap if math.isfinite(gap) else None


def broken_loss(row: TuneRow, baseline: TuneRow | None) -> str:
    """Return why the loss of a candidate is not one of a working training; empty if nothing shows that."""
    own, other = row.losses, baseline.losses if baseline is not None else None
    if own is None or other is None or not all(map(math.isfinite, other)):
        return ""
    if not all(map(math.isfinite, own)):
        return "its loss is not finite, that of BF16 is"
    gap = loss_gap(row, baseline)
    if gap is None:
        return ""
    error = math.hypot(*(statistics.pstdev(each) / math.sqrt(len(each)) for each in (own, other)))
    if gap <= max(BROKEN, 3 * error / abs(statistics.fmean(other))):
        return ""
    return f"its loss is {gap:.0%} above that of BF16 on the same steps"


@dataclasses.dataclass
class TuneReport:
    """The rows in the order of the candidates. interrupted: True if it was stopped before its end."""

    rows: list[TuneRow]
    interrupted: bool = False
    on_change: Callable[[TuneReport], None] = lambda _report: None
    running: str = ""

    @property
    def baseline(self) -> TuneRow | None:
        """The fastest row without FP8."""
        rows = [row for row in self.rows if row.candidate.is_baseline and row.measured]
        return min(rows, key=_ms, default=None)

    def eligible(self) -> list[TuneRow]:
        """Return the rows that may win: measured, and with a loss that is not broken."""
        baseline = self.baseline
        return [row for row in self.rows if row.measured and not broken_loss(row, baseline)]

    @property
    def winner(self) -> TuneRow | None:
        """The fastest row, or, of those that are as fast, the one that changes the config least; None without a row.

        Of those that change equally many fields, the faster one. None as well if the search was interrupted.
        """
        rows = self.eligible()
        if self.interrupted or not rows:
            return None
        best = min(rows, key=_ms)
        return min(
            (row for row in rows if not is_slower(row, best)), key=lambda row: (len(row.candidate.overrides), _ms(row))
        )

    def as_json(self) -> dict[str, Any]:
        """Return the output of `--format json`."""
        baseline, winner = self.baseline, self.winner
        return {
            "version": 1,
            "candidates": [_as_json(row, baseline) for row in self.rows],
            "winner": winner.candidate.name if winner is not None else None,
        }


def is_slower(row: TuneRow, best: TuneRow) -> bool:
    """Return True if a row is slower than the best one, by more than the intervals and `EQUAL` allow."""
    own, other = row.time, best.time
    assert own is not None and other is not None  # both were measured
    return own.low > other.high and own.ms > other.ms * (1 + EQUAL)


def _ms(row: TuneRow) -> float:
    time = row.time
    return time.ms if time is not None else math.inf


def _as_json(row: TuneRow, baseline: TuneRow | None) -> dict[str, Any]:
    time = row.time if row.measured else None
    return {
        "name": row.candidate.name,
        "overrides": dict(row.candidate.overrides),
        "ms": time and round(time.ms, 4),
        "interval": time and [round(time.low, 4), round(time.high, 4)],
        "gib": round(row.bytes / 2**30, 3) if row.measured and row.bytes is not None else None,
        "loss_gap": loss_gap(row, baseline) if row.measured else None,
        "state": row.state,
        "reason": row.reason or (broken_loss(row, baseline) if row.measured else ""),
    }
