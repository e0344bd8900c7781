"""Errors of means: right for independent and for autocorrelated series."""

from __future__ import annotations

import math
import random

import pytest
from log_files import losses

from mpguard.compare.intervals import (
    MIN_BLOCK,
    MIN_BLOCKS,
    block_mean_estimate,
    correlation_around_trend,
    memory,
    t_quantile,
    t_upper_tail,
)


def series(draw: random.Random, count: int, share: float) -> list[float]:
    found, value = [], 0.0
    for _ in range(count):
        value = share * value + draw.gauss(0, 1)
        found.append(value)
    return found


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 6.31375), (2, 2.91999), (2.5, 2.55822), (4, 2.13185), (19, 1.72913), (1e6, 1.64485)]
)
def test_quantiles_are_those_of_the_tables(freedom: float, quantile: float) -> None:
    assert t_quantile(0.95, freedom) == pytest.approx(quantile, abs=1e-4)
    assert t_upper_tail(quantile, freedom) == pytest.approx(0.05, abs=1e-5)
    assert t_upper_tail(-quantile, freedom) == pytest.approx(0.95, abs=1e-5)
    assert t_upper_tail(math.inf, freedom) == 0


@pytest.mark.parametrize(("share", "points"), [(0.0, 1.0), (0.5, 3.0), (0.9, 19.0)])
def test_the_memory_is_that_of_the_process(share: float, points: float) -> None:
    assert memory(series(random.Random(1), 8000, share)) == pytest.approx(points, rel=0.25)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_the_interval_misses_as_often_as_it_states(share: float) -> None:
    """90 % intervals, 300 series: between 5 and 16 % miss. Those that take points for independent miss far more."""
    draw = random.Random(2)
    missed = naive = 0
    for _ in range(300):
        values = series(draw, 2000, share)
        estimate = block_mean_estimate(values)
        missed += abs(estimate.mean) > estimate.half_width(0.05)
        spread = math.sqrt(sum((value - estimate.mean) ** 2 for value in values) / len(values) / (len(values) - 1))
        naive += abs(estimate.mean) > 1.645 * spread
    assert 0.05 <= missed / 300 <= 0.16
    if share == 0.9:
        assert naive / 300 > 0.5, "the test can fail"


def test_a_slow_drift_is_no_error_of_the_mean() -> None:
    """The chance of the batches is; the drift is what the two runs did, and its mean is known as exactly as without."""
    draw = random.Random(4)
    noise = series(draw, 1200, 0.0)
    drift = [math.sin(i / 200) for i in range(1200)]
    plain = block_mean_estimate(noise)
    drifting = block_mean_estimate([a + b for a, b in zip(noise, drift, strict=True)])
    assert drifting.error == pytest.approx(plain.error, rel=0.1) and drifting.enough
    assert drifting.mean == pytest.approx(plain.mean + sum(drift) / 1200)
    assert not block_mean_estimate([5 * each for each in drift]).enough, "nothing but drift"


def test_losses_that_the_logger_has_smoothed_get_longer_blocks() -> None:
    """Means over the last 20 records, of series without a difference: an interval that can be trusted rarely misses."""
    draw = random.Random(5)
    missed = 0
    for _ in range(100):
        values = series(draw, 8000, 0.0)
        total = [sum(values[:20])]
        for old, new in zip(values, values[20:], strict=False):
            total.append(total[-1] + new - old)
        estimate = block_mean_estimate(total)
        assert estimate.block >= 100 and estimate.enough
        missed += abs(estimate.mean) > estimate.half_width(0.05)
    assert missed <= 18


def test_it_is_known_if_there_are_too_few_blocks() -> None:
    draw = random.Random(3)
    assert not block_mean_estimate(series(draw, MIN_BLOCK * MIN_BLOCKS - 1, 0.0)).enough
    assert block_mean_estimate(series(draw, MIN_BLOCK * MIN_BLOCKS, 0.0)).enough
    assert not block_mean_estimate(series(draw, 2000, 0.99)).enough
    assert not block_mean_estimate([1.0]).enough and block_mean_estimate([1.0, 1.0]).error == 0


def test_runs_on_the_same_batches_are_recognized() -> None:
    same = correlation_around_trend(*([*losses(order=0, seed=seed).values()] for seed in (1, 2)))
    other = correlation_around_trend(*([*losses(order=seed, seed=seed).values()] for seed in (1, 2)))
    assert same > 0.9 and abs(other) < 0.2
    assert correlation_around_trend([1.0] * 100, [2.0] * 100) == 0, "without any ups and downs"
