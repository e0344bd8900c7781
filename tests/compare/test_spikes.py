"""Spikes in the difference of two losses."""

from __future__ import annotations

import math
import random

import pytest
from log_files import log, losses

from mpguard.compare import RunVerdict, compare
from mpguard.compare.spikes import spikes


def verdict(bump: dict[int, float]) -> RunVerdict:
    run = {step: value + bump.get(step, 0.0) for step, value in losses(seed=1).items()}
    return compare({"fp8": [log(run)], "bf16": [log(losses(seed=2))]}, "bf16").verdicts[0]


@pytest.mark.parametrize(
    "bump",
    [
        {700 + i: 3 * math.exp(-i / 15) for i in range(60)},
        {700 + i: 0.7 for i in range(20)},
        {1000: 2.0, 1001: 5.0, 1002: 2.0},
    ],
)
def test_a_spike_that_recovers_is_named_and_left_out(bump: dict[int, float]) -> None:
    found = verdict(bump)
    assert found.verdict == "same" and len(found.spikes) == 1
    first, last = found.spikes[0]
    assert abs(first - min(bump)) <= 1 and last <= max(bump) + 1
    assert any(f"a spike at steps {first} to {last}, up to +" in note for note in found.notes)


def test_the_sentence_has_the_spike() -> None:
    run = {step: value + (2.0 if 700 <= step < 720 else 0.0) for step, value in losses(seed=1).items()}
    report = compare({"fp8": [log(run)], "bf16": [log(losses(seed=2))]}, "bf16")
    assert report.title().endswith(", after a spike at steps 700 to 719")
    assert report.as_json()["runs"][0]["spikes"] == [[700, 719]]


@pytest.mark.parametrize("bump", [dict.fromkeys(range(1400, 1501), 0.7), dict.fromkeys(range(500, 900), 0.7)])
def test_what_is_not_recovered_from_or_lasts_is_no_spike(bump: dict[int, float]) -> None:
    found = verdict(bump)
    assert not found.spikes and found.verdict != "same"


def test_noise_has_no_spikes() -> None:
    draw = random.Random(1)
    assert not spikes([draw.gauss(0, 0.01) for _ in range(5000)], 0.005)
    assert not spikes([draw.gauss(0, 0.01) + (1.0 if i % 100 == 0 else 0.0) for i in range(1000)], 0.005), "one record"
    assert not spikes([], 0.005)
