"""Losses in another unit are no divergence; a run that trains worse has no factor that stays the same."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mpguard.compare import RunLog, RunVerdict, compare

NOISE = random.Random(0)
LOSS = {k: 2 + 3 * math.exp(-k / 200) + 0.05 * NOISE.gauss(0, 1) for k in range(1, 1501)}
OTHER = {k: value + 0.002 * NOISE.gauss(0, 1) for k, value in LOSS.items()}


def verdict(run: dict[int, float], base: dict[int, float] = LOSS) -> RunVerdict:
    logs = {name: [RunLog(name, Path(name), "jsonl", loss)] for name, loss in (("run", run), ("base", base))}
    return compare(logs, "base").verdicts[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda loss: 4 * loss, "4 times that of the baseline from the first record to the last: another unit (such"),
        (lambda loss: loss / 8, "0.125 times"),
        (lambda loss: loss / math.log(2), "bits and nats"),
        (lambda loss: loss * math.log(2), "bits and nats"),
        (math.exp, "the run logs the perplexity"),
    ],
)
def test_another_unit_is_inconclusive(change: Callable[[float], float], text: str) -> None:
    found = verdict({k: change(value) for k, value in OTHER.items()})
    assert found.verdict == "inconclusive" and text in found.reason
    assert "--loss" in found.reason


def test_a_baseline_of_perplexities() -> None:
    found = verdict(OTHER, {k: math.exp(value) for k, value in LOSS.items()})
    assert found.verdict == "inconclusive" and "the baseline is a perplexity" in found.reason


@pytest.mark.parametrize(
    "run",
    [
        {k: value if k < 50 else 4.5 for k, value in OTHER.items()},  # stuck
        {k: value * (1 + 0.3 * min(1.0, k / 300)) for k, value in OTHER.items()},  # worse, more and more
        {k: value + 0.3 for k, value in OTHER.items()},
    ],
)
def test_a_run_that_is_worse_has_diverged(run: dict[int, float]) -> None:
    assert verdict(run).verdict == "diverged"


def test_two_flat_losses_have_no_unit() -> None:
    """A fine-tuning whose loss hardly falls, and a run that learned nothing at a higher loss."""
    flat = {k: 2 + 0.01 * NOISE.gauss(0, 1) for k in LOSS}
    assert verdict({k: 1.4 * value for k, value in flat.items()}, flat).verdict == "diverged"
