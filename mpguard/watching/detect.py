"""Decides from the numbers of past steps what is an event. Plain Python, because it sees a few numbers per step."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

#: Steps that are remembered, and the fewest after which anything is compared.
WINDOW, FEWEST = 200, 30

#: A gradient norm is a jump if it is this many times the median, and this many deviations (of logarithms) above it.
JUMP_FACTOR, JUMP_DEVIATIONS = 10.0, 8.0

#: Norms after which the median of the past ones is computed again.
REFRESH = 10

#: Losses after which the median of the recent ones is compared.
COMPARED_EVERY = 5

#: Steps whose median loss is compared, and the deviations of the loss by which it must have risen.
RECENT, RISE_DEVIATIONS = 25, 6.0

#: The loss diverges if it has lost this share of what it had gained since its start.
LOST_SHARE = 0.5

#: First losses, and how many times their median the loss must be to have exploded before it fell.
FIRST_LOSSES, EXPLODED_TIMES = 3, 1000.0

#: Steps skipped in a row, and a dynamic loss scale, at which the loss scale collapses.
SKIPPED_IN_A_ROW, LOWEST_SCALE = 8, 1.0

#: A rank is apart if its median loss is this many deviations (of the losses of all ranks) from the median of all.
APART_DEVIATIONS = 12.0

#: A tensor saturates if its largest value is this many times what its scale allows, at 2 of `FP8_RECENT` checks; or so
#: many times at one. Delayed scaling clips a little at each new maximum.
SATURATED, SATURATED_AT_ONCE, FP8_RECENT = 2.0, 16.0, 5

#: A scale drifts if the largest values of a tensor have become this many times those of its first checks.
DRIFT, FP8_FIRST = 16.0, 10


def deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation, scaled so that it is the standard deviation of normal values."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


class NormJumps:
    """Finds jumps of the gradient norm: far above what the last steps had, on a logarithmic scale."""

    def __init__(self) -> None:
        self._past: deque[float] = deque(maxlen=WINDOW)
        self._middle, self._added = 0.0, 0

    def add(self, norm: float) -> float | None:
        """Add the norm of a step; return how many times the median it is if it is a jump."""
        if not math.isfinite(norm) or norm <= 0.0:
            return None
        jump = None
        if len(self._past) >= FEWEST:
            if self._added % REFRESH == 0:
                self._middle = statistics.median(self._past)
            # The median is computed again only for what is far above an older one: it moves slowly.
            if math.log(norm) - self._middle > math.log(JUMP_FACTOR) / 2:
                middle, spread = statistics.median(self._past), deviation(self._past)
                above = math.log(norm) - middle
                if above > math.log(JUMP_FACTOR) and above > JUMP_DEVIATIONS * spread:
                    jump = math.exp(above)
            self._added += 1
        self._past.append(math.log(norm))
        return jump


class Divergence:
    """Finds a loss that has lost half of what it had gained, and stays so.

    Medians of `RECENT` steps are compared, so that single losses do not matter. A loss that never fell cannot diverge
    before it is above its start by as much, or has exploded in the first steps.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._first: list[float] = []
        self._start: float | None = None
        self._best = math.inf
        self._spread = 0.0
        self._steps = 0
        self._diverged = False

    def add(self, loss: float) -> tuple[float, float] | None:
        """Add the loss of a step; return the median loss now and the best one, when they have become too far apart."""
        if not math.isfinite(loss):
            return None
        self._steps += 1
        self._recent.append(loss)
        if len(self._first) < FIRST_LOSSES:
            self._first.append(loss)
        if len(self._recent) < RECENT or self._steps % COMPARED_EVERY:
            return None
        now = statistics.median(self._recent)
        if self._start is None:
            self._start = now
            first = min(self._first)
            if 0 < EXPLODED_TIMES * first < now:
                self._best, self._diverged = first, True
                return now, first
        if now < self._best:
            self._best = now
            self._spread = max(deviation(self._recent), 1e-3 * abs(now))
            self._diverged = False
        gained = self._start - self._best
        rise = max(LOST_SHARE * gained, RISE_DEVIATIONS * max(self._spread, 1e-6 * abs(self._start)))
        if self._diverged or self._steps < RECENT + FEWEST or now <= self._best + rise:
            return None
        # In a noisy run single losses reach far up: three quarters of the recent ones must be above the best median.
        if sum(value > self._best + rise / 2 for value in self._recent) < 0.75 * RECENT:
            return None
        self._diverged = True
        return now, self._best


class ScaleCollapse:
    """Finds a loss scale that collapses: many steps skipped in a row, or a dynamic scale that has fallen below 1."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._reported = False

    def add(self, skipped: bool, scale: float | None) -> bool:
        """Add a step; return True when the scale collapses."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        low = scale is not None and 0.0 < scale < LOWEST_SCALE and skipped
        collapsed = low or self.in_a_row >= SKIPPED_IN_A_ROW
        report = collapsed and not self._reported
        self._reported = collapsed
        return report


class Fp8Ranges:
    """Finds what saturates in FP8, and scales that drift: each tensor once."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._reported: set[tuple[str, str]] = set()

    def add(self, name: str, times: float, largest: float) -> list[tuple[str, float]]:
        """Add a check of a tensor; return the events, each with how many times too large it is.

        times: its largest value over what its scale allows.
        """
        if not (math.isfinite(times) and math.isfinite(largest)) or largest <= 0.0:
            return []
        found = []
        recent = self._times.setdefault(name, deque(maxlen=FP8_RECENT))
        recent.append(times)
        if times >= SATURATED_AT_ONCE or sum(each >= SATURATED for each in recent) >= 2:
            found.append(("fp8_saturation", max(recent)))
        first = self._first.setdefault(name, [])
        if len(first) < FP8_FIRST:
            first.append(largest)
        else:
            latest = self._recent.setdefault(name, deque(maxlen=FP8_RECENT))
            latest.append(largest)
            growth = statistics.median(latest) / statistics.median(first)
            if len(latest) == FP8_RECENT and growth >= DRIFT:
                found.append(("fp8_scale_drift", growth))
        fresh = [(kind, value) for kind, value in found if (name, kind) not in self._reported]
        self._reported.update((name, kind) for kind, _ in fresh)
        return fresh


def apart(losses: Sequence[float], spreads: Iterable[float]) -> list[int]:
    """Return the ranks whose median loss is far from that of the others.

    losses: the median loss of each rank over the same steps. spreads: the deviation of the losses of each.
    """
    middle = statistics.median(losses)
    spread = max(statistics.median(spreads), deviation(losses), 1e-3 * abs(middle), 1e-12)
    return [rank for rank, loss in enumerate(losses) if not abs(loss - middle) <= APART_DEVIATIONS * spread]
