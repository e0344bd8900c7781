"""Runs whose loggers differ from the baseline's: other step numbers, means of several steps, smoothed losses."""

from __future__ import annotations

import math

import pytest
from log_files import log, losses, skipped

from mpguard.compare import RunLog, RunVerdict, compare
from mpguard.compare.alignment import align, order_correlation, smoothed


def verdict(run: RunLog, base: RunLog) -> RunVerdict:
    return compare({"run": [run], "base": [base]}, "base").verdicts[0]


def renumbered(loss: dict[int, float], offset: int) -> dict[int, float]:
    return {step + offset: value for step, value in loss.items()}


def means(loss: dict[int, float], count: int, offset: int = 0) -> dict[int, float]:
    """Return the means of each `count` steps, logged at the last of them plus an offset."""
    return {
        last + offset: math.fsum(loss[step] for step in range(last - count + 1, last + 1)) / count
        for last in range(count, len(loss) + 1, count)
    }


@pytest.mark.parametrize("offset", [-1, 1, 10, 700])
def test_steps_that_are_counted_from_another_number(offset: int) -> None:
    found = verdict(log(renumbered(losses(seed=1), offset)), log(losses(seed=2)))
    assert found.verdict == "same" and found.coverage == 1.0 and found.window == (152, 1500)
    assert any(f"step {1 + offset} is compared with step 1 of the baseline" in note for note in found.notes)


@pytest.mark.parametrize(("unit", "first"), [(4, 4), (8192, 8192), (2, 1)])
def test_steps_in_another_unit(unit: int, first: int) -> None:
    """Micro-batches, tokens, and the calls of a logger that is called twice in a step."""
    run = {first + unit * (step - 1): value for step, value in losses(seed=1).items()}
    found = verdict(log(run), log(losses(seed=2)))
    assert found.verdict == "same" and found.coverage == 1.0 and found.window == (152, 1500)
    expected = f"{unit} steps of the run are taken as 1 of the baseline, from step {first} and step 1 on"
    assert any(expected in note for note in found.notes)


def test_means_of_other_lengths_are_no_other_unit() -> None:
    one, other = log(means(losses(seed=1), 25)), log(means(losses(seed=2), 10))
    assert align(one, other).note == ""


@pytest.mark.parametrize("every", [2, 10])
def test_each_tenth_step_counted_from_another_number(every: int) -> None:
    """`if step % 10 == 0` with steps from 0; the baseline counts from 1, and logs each."""
    run = {step - 1: value for step, value in losses(seed=1, noise=0.01).items() if (step - 1) % every == 0}
    found = verdict(log(run), log(losses(seed=2, noise=0.01)))
    assert found.verdict == "same" and any("step 0 is compared with step 1" in note for note in found.notes)


def test_a_run_that_was_resumed_and_counts_from_1_again() -> None:
    rest = {step - 600: value for step, value in losses(seed=1).items() if step > 600}
    aligned = align(log(rest), log(losses(seed=2)))
    assert min(aligned.run.loss) == 601 and "step 1 is compared with step 601" in aligned.note


def test_events_move_with_their_steps() -> None:
    run = log(renumbered(losses(seed=1), 5), events=(skipped(25),), grad_norm={25: 1.0}, fp8={"snr": {15: 30.0}})
    moved = align(run, log(losses(seed=2))).run
    assert moved.events[0].step == 20 and moved.grad_norm == {20: 1.0} and moved.fp8 == {"snr": {10: 30.0}}


@pytest.mark.parametrize("order", range(1, 9))
def test_another_order_is_no_offset(order: int) -> None:
    run, base = log(losses(order=order, seed=order)), log(losses(order=order + 100, seed=2))
    assert align(run, base).note == "" and order_correlation(run.loss, base.loss) < 0.3


@pytest.mark.parametrize(("count", "offset"), [(10, 0), (2, 0), (5, 0), (10, -1)])
def test_means_of_several_steps(count: int, offset: int) -> None:
    one, other = losses(seed=1, noise=0.01), losses(seed=2, noise=0.01)
    for run, base in ((log(means(one, count, offset)), log(other)), (log(one), log(means(other, count, offset)))):
        found = verdict(run, base)
        assert found.verdict == "same" and found.method == "paired steps"
        assert any(f"mean of {count} steps" in note for note in found.notes)
        assert found.compared is not None and found.coverage is not None and found.coverage > 0.99


def test_every_tenth_raw_loss_is_not_averaged() -> None:
    found = verdict(log({step: value for step, value in losses(seed=1).items() if step % 10 == 0}), log(losses(seed=2)))
    assert found.compared is None and not found.notes


def test_means_of_a_worse_run_are_different() -> None:
    found = verdict(log(means(losses(seed=1, noise=0.01, factor=1.02), 10)), log(losses(seed=2, noise=0.01)))
    assert found.verdict == "different" and found.difference == pytest.approx(0.02, abs=0.002)


def test_a_running_mean_is_named() -> None:
    raw, value, kept = losses(seed=1), 4.5, {}
    for step, loss in raw.items():
        value = 0.98 * value + 0.02 * loss
        kept[step] = value
    found = verdict(log(kept), log(losses(seed=2)))
    assert found.verdict == "inconclusive" and "the losses of the run are smoothed" in found.reason
    assert found.needed is None and smoothed(log(raw), log(kept)) == "baseline"
    assert smoothed(log(kept), log(kept)) is None
