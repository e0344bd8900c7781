"""What is an event, from the numbers of past steps: found where there is one, and not where there is none."""

from __future__ import annotations

import math
import random

import pytest

from mpguard.watching.detect import Divergence, NormJumps, ScaleCollapse, apart


def curve(steps: int, noise: float, seed: int = 0, end: float = 2.0) -> list[float]:
    """Return a loss that falls from 10 as losses do."""
    chance = random.Random(seed)
    return [end + (10 - end) * math.exp(-step / 200) + chance.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 2.0])
def test_a_falling_loss_does_not_diverge(noise: float) -> None:
    for seed in range(5):
        found = Divergence()
        assert [step for step, loss in enumerate(curve(2000, noise, seed)) if found.add(loss)] == []


def test_a_constant_loss_with_noise_does_not_diverge() -> None:
    for seed in range(20):
        chance, found = random.Random(seed), Divergence()
        assert not any(found.add(chance.gauss(1.0, 0.3)) for _ in range(3000))


@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_a_loss_that_rises_diverges_once(noise: float) -> None:
    losses = curve(1000, noise)
    rising = [losses[-1] + step * 0.05 for step in range(200)]
    found = Divergence()
    events = [step for step, loss in enumerate(losses + rising) if found.add(loss)]
    assert len(events) == 1 and 1000 < events[0] < 1200


def test_single_high_losses_do_not_diverge() -> None:
    found = Divergence()
    losses = [loss * (20 if step % 40 == 39 else 1) for step, loss in enumerate(curve(1000, 0.1))]
    assert not any(found.add(loss) for loss in losses)


def test_a_jump_of_the_norm() -> None:
    chance, found = random.Random(0), NormJumps()
    norms = [math.exp(chance.gauss(0, 0.4)) for _ in range(3000)]
    assert not any(found.add(norm) for norm in norms)
    times = found.add(60.0)
    assert times is not None and times == pytest.approx(60, rel=0.3)
    assert found.add(1.0) is None and found.add(math.inf) is None and found.add(0.0) is None


def test_a_collapse_is_found_once() -> None:
    found = ScaleCollapse()
    assert not any(found.add(step % 3 == 0, 65536.0) for step in range(99))
    assert [step for step in range(1, 30) if found.add(True, 2.0**-step * 2**20)] == [8]
    assert not found.add(False, 1.0) and found.in_a_row == 0
    assert found.add(True, 0.5), "a dynamic scale below 1"


def test_ranks_apart() -> None:
    assert apart([2.0, 2.02, 1.99, 2.01], [0.1] * 4) == []
    assert apart([2.0, 2.02, 5.0, 2.01], [0.1] * 4) == [2]
