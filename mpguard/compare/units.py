"""Recognize losses in another unit: sums over micro-batches, bits in the place of nats, perplexity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from itertools import pairwise

#: The common steps are divided into so many parts, of at least so many records.
_PARTS, _MIN_RECORDS = 10, 3
#: In each part the factor is that of the whole run within this share.
_EQUAL = 0.01
#: A factor nearer to 1 is a difference of the runs.
_LEAST = 0.1
#: The baseline must have moved by this share: two flat losses have a factor in any case.
_MOVED = 0.05


def other_unit(run: Mapping[int, float], base: Mapping[int, float]) -> str | None:
    """Return how two losses differ if one is the other in another unit, from the first record to the last; else None.

    A run that trains worse has no factor that stays the same while the loss falls.
    """
    steps = sorted(run.keys() & base.keys())
    if len(steps) < _PARTS * _MIN_RECORDS or not all(0 < run[k] < math.inf and 0 < base[k] < math.inf for k in steps):
        return None

    def parts(value: Callable[[int], float]) -> list[float]:
        ends = [len(steps) * i // _PARTS for i in range(_PARTS + 1)]
        return [statistics.median(map(value, steps[a:b])) for a, b in pairwise(ends)]

    losses = parts(lambda k: base[k])
    if abs(losses[0] - losses[-1]) < _MOVED * abs(losses[-1]):
        return None
    factor = _constant(parts(lambda k: run[k] / base[k]))
    if factor is not None and abs(math.log(factor)) > math.log1p(_LEAST):
        shown = f"{factor:.4g} times that of the baseline"
        bits = any(math.isclose(factor, each, rel_tol=0.005) for each in (1 / math.log(2), math.log(2)))
        likely = "bits and nats" if bits else "such as a sum and a mean over micro-batches"
        return f"the loss is {shown} from the first record to the last: another unit ({likely})"
    for one, other, text in ((run, base, "the run logs the perplexity"), (base, run, "the baseline is a perplexity")):
        if all(one[k] > 1 for k in steps):
            same = _constant(parts(lambda k, one=one, other=other: math.log(one[k]) / other[k]))  # type: ignore[misc]
            if same is not None and abs(same - 1) <= _EQUAL:
                return f"{text}, e to the power of the other loss"
    return None


def _constant(values: list[float]) -> float | None:
    """Return the median of values that are all the same; None if they are not."""
    middle = statistics.median(values)
    return middle if all(abs(value - middle) <= _EQUAL * middle for value in values) else None
