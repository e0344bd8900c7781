"""Estimates of means of autocorrelated series, with their errors: standard library only.

Losses are never smoothed before a test: smoothed values are autocorrelated over the width of the window, and a test
that takes them for independent calls most equal runs different.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from itertools import accumulate

#: A block has at least this many points, and so many times the memory of the series; and there are so many blocks.
MIN_BLOCK, MIN_MEMORIES, MIN_BLOCKS = 5, 5, 20
#: Half the width, in points, of the moving average that correlation is computed around.
_TREND = 25
#: A deviation from the trend counts as at most so many times the median one, so that one spike does not decide.
_FAR = 6.0
#: Two parts of a series are told apart by a jump between their means of so many standard errors.
_JUMP_ERRORS = 6.0


@dataclasses.dataclass(frozen=True)
class MeanEstimate:
    """The mean of a series and its standard error. `enough`: True if there are blocks enough to trust the error."""

    mean: float
    error: float
    freedom: float
    block: int
    enough: bool

    def half_width(self, alpha: float) -> float:
        """Return half the width of the two-sided interval that misses by `alpha` on each side."""
        return t_quantile(1 - alpha, min(self.freedom, 1e6)) * self.error if self.error else 0.0


def block_mean_estimate(values: Sequence[float]) -> MeanEstimate:
    """Return the mean of a series, and its error from how neighbouring blocks differ.

    The difference of two losses on one batch is what these two models differ by on average, which moves slowly, and
    chance of the batch. Batches are drawn without regard to the models, so this chance is uncorrelated from step to
    step whatever the models do (a martingale difference), and only it is an error of the mean. What moves more slowly
    than a block is a property of the two runs, and cancels out between neighbours: von Neumann's mean square successive
    difference (Annals of Mathematical Statistics 12, 1941), of the means of blocks. Blocks are short, unless the logger
    made neighbours alike. All pairs of neighbouring blocks count: nothing is drawn at random, so the same logs give the
    same verdict.
    """
    n = len(values)
    if n < 2:
        return MeanEstimate(values[0] if values else math.nan, math.inf, 1, MIN_BLOCK, False)
    needed = max(MIN_BLOCK, math.ceil(MIN_MEMORIES * memory(values)))
    block = max(1, min(needed, n // 3))
    mean = math.fsum(values) / n
    sums = list(accumulate((value - mean for value in values), initial=0.0))
    means = [(sums[i + block] - sums[i]) / block for i in range(n - block + 1)]
    changes = [(after - before) ** 2 for before, after in zip(means, means[block:], strict=False)]
    variance = math.fsum(changes) / len(changes) / 2
    blocks = n / block
    return MeanEstimate(mean, math.sqrt(variance / blocks), max(1.0, blocks - 1), needed, n // needed >= MIN_BLOCKS)


def mean_estimate(values: Sequence[float]) -> MeanEstimate:
    """Return the mean of a series and its error, which a jump of its level does not increase.

    A jump looks like a long memory, which needs longer blocks than there are. The parts before and after it are
    estimated each by itself.
    """
    whole = block_mean_estimate(values)
    at = None if whole.enough else jump(values)
    if at is None:
        return whole
    parts = [block_mean_estimate(values[:at]), block_mean_estimate(values[at:])]
    shares = [at / len(values), 1 - at / len(values)]
    error = math.hypot(*(share * part.error for share, part in zip(shares, parts, strict=True)))
    freedom = sum(part.freedom for part in parts)
    block = max(part.block for part in parts)
    return MeanEstimate(whole.mean, error, freedom, block, len(values) // block >= MIN_BLOCKS)


def jump(values: Sequence[float]) -> int | None:
    """Return the index at which the level of a series jumps; None if there is no clear jump.

    It is the split that makes the squares around both means least. At a jump most of the difference of the means is
    there in the next tenth of the records; in a drift it is not.
    """
    n = len(values)
    if n < 4 * MIN_BLOCK:
        return None
    sums = list(accumulate(values, initial=0.0))

    def gain(i: int) -> float:
        return float((sums[i] - sums[n] * i / n) ** 2 / (i * (n - i)))

    at = max(range(2 * MIN_BLOCK, n - 2 * MIN_BLOCK + 1), key=gain)
    before, after = block_mean_estimate(values[:at]), block_mean_estimate(values[at:])
    size = after.mean - before.mean
    width = max(2 * MIN_BLOCK, min(n // 10, at, n - at))
    near = (sums[at + width] - sums[at] - (sums[at] - sums[at - width])) / width
    clear = abs(size) > _JUMP_ERRORS * math.hypot(before.error, after.error)
    return at if clear and near * size > 0 and abs(near) > 0.6 * abs(size) else None


def memory(values: Sequence[float]) -> float:
    """Return over how many points a series remembers chance, by its correlation with its successor; 1: not at all.

    Losses that the logger has smoothed have a long memory. A straight drift is none: it is what two runs do.
    """
    centered = _without_line(values)
    variance = math.fsum(map(operator.mul, centered, centered))
    if variance == 0:
        return 1.0
    correlation = math.fsum(map(operator.mul, centered, centered[1:])) / variance
    return max(1.0, (1 + correlation) / max(1 - correlation, 1e-9))  # that of a process of first order


def _without_line(values: Sequence[float]) -> list[float]:
    """Return a series minus the straight line through it with the least squares."""
    n = len(values)
    mean, middle = math.fsum(values) / n, (n - 1) / 2
    spread = n * (n * n - 1) / 12
    slope = math.fsum((i - middle) * value for i, value in enumerate(values)) / spread if spread else 0.0
    return [value - mean - slope * (i - middle) for i, value in enumerate(values)]


def correlation_around_trend(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how far two losses go up and down together from step to step, from -1 to 1.

    Near 1: the same batches in the same order. The trend, a centered moving average, is taken out first.
    """
    return correlation(around_trend(one), around_trend(other))


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the correlation of two series whose means are zero; 0 if one of them is constant."""
    scale = math.sqrt(math.fsum(map(operator.mul, a, a)) * math.fsum(map(operator.mul, b, b)))
    return math.fsum(map(operator.mul, a, b)) / scale if scale else 0.0


def around_trend(values: Sequence[float]) -> list[float]:
    """Return a series without its trend, a centered moving average; a spike counts as the largest usual deviation."""
    sums = list(accumulate(values, initial=0.0))
    n = len(values)
    ends = ((max(0, i - _TREND), min(n, i + _TREND + 1)) for i in range(n))
    found = [value - (sums[high] - sums[low]) / (high - low) for value, (low, high) in zip(values, ends, strict=True)]
    most = _FAR * sorted(map(abs, found))[n // 2] if found else 0.0
    return [max(-most, min(most, value)) for value in found] if most else found


def t_upper_tail(t: float, freedom: float) -> float:
    """Return the probability that Student's t is above `t`: Simpson's rule over an angle, exact to about 1e-10."""
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    end = math.atan(abs(t) / math.sqrt(freedom))  # t = sqrt(freedom) tan(angle): the density becomes cos^(freedom - 1)
    steps = 400
    width = end / steps
    weights = (1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1))
    area = math.fsum(w * math.cos(i * width) ** (freedom - 1) for i, w in enumerate(weights)) * width / 3
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)
    inside = area * math.exp(log_scale)
    return max(0.0, 0.5 - inside) if t >= 0 else min(1.0, 0.5 + inside)


@functools.lru_cache(maxsize=1024)
def t_quantile(probability: float, freedom: float) -> float:
    """Return the value that Student's t is below with a probability above one half."""
    low, high = 0.0, 1.0
    while t_upper_tail(high, freedom) > 1 - probability and high < 1e8:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_upper_tail(middle, freedom) > 1 - probability else (low, middle)
    return high
