"""Find spikes: stretches of steps in which a run is far above its baseline, or not finite, and recovers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

#: A spike begins this many standard deviations of the noise above the usual difference, and so many margins; it
#: reaches as far as the difference stays above the lower number.
_HIGH, _LOW, _MARGINS = 8.0, 3.0, 4.0
#: So many records must be that high: one record may be chance of its batch.
_MIN_RECORDS = 3
#: Spikes take at most this share of the records, and after the last one there are so many times its records.
_MOST, _AFTER = 0.1, 3


@dataclasses.dataclass(frozen=True)
class Spike:
    """A stretch of records, by index, and the largest difference in it."""

    first: int
    last: int
    peak: float

    def __len__(self) -> int:
        return self.last + 1 - self.first


def spikes(gaps: Sequence[float], margin: float) -> list[Spike]:
    """Return the spikes in differences; none if they take more than a tenth, or if the last is not recovered from."""
    if len(gaps) < 2 * _MIN_RECORDS:
        return []
    usual, noise = sorted(gaps)[len(gaps) // 2], noise_of(gaps)
    low, high = usual + _LOW * noise, usual + max(_HIGH * noise, _MARGINS * margin)
    found = []
    for above, group in itertools.groupby(range(len(gaps)), key=lambda i: gaps[i] > low):
        stretch = list(group)
        if above and sum(gaps[i] > high for i in stretch) >= _MIN_RECORDS:
            found.append(Spike(stretch[0], stretch[-1], max(gaps[i] for i in stretch)))
    return _recovered(found, len(gaps))


def not_finite(losses: Sequence[float]) -> list[Spike]:
    """Return the stretches of losses that are not finite, if the run recovers from them: weights that are NaN cannot.

    None if they take more than a tenth, or if the last is not recovered from.
    """
    found = []
    for bad, group in itertools.groupby(range(len(losses)), key=lambda i: not math.isfinite(losses[i])):
        if bad:
            stretch = list(group)
            found.append(Spike(stretch[0], stretch[-1], math.inf))
    return _recovered(found, len(losses))


def _recovered(found: list[Spike], records: int) -> list[Spike]:
    """Return the spikes of a run; none if they take more than a tenth, or if the last is not recovered from."""
    if not found or sum(map(len, found)) > _MOST * records:
        return []
    return found if records - 1 - found[-1].last >= _AFTER * len(found[-1]) else []


def noise_of(gaps: Sequence[float]) -> float:
    """Return the standard deviation of differences by their successive changes: a lasting difference adds nothing."""
    changes = sorted(abs(after - before) for before, after in itertools.pairwise(gaps))
    return 1.4826 * changes[len(changes) // 2] / 2**0.5 if changes else 0.0
