"""Find spikes in the difference of two losses: stretches of steps in which a run is far above, and recovers."""

from __future__ import annotations

import dataclasses
import itertools
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
    if not found or sum(map(len, found)) > _MOST * len(gaps):
        return []
    return found if len(gaps) - 1 - found[-1].last >= _AFTER * len(found[-1]) else []


def noise_of(gaps: Sequence[float]) -> float:
    """Return the standard deviation of differences by their successive changes: a lasting difference adds nothing."""
    changes = sorted(abs(after - before) for before, after in itertools.pairwise(gaps))
    return 1.4826 * changes[len(changes) // 2] / 2**0.5 if changes else 0.0
