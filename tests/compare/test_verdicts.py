"""Verdicts: each outcome, in each design, with what is needed where the runs do not decide."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from log_files import log, losses, skipped

from mpguard.compare import Criteria, Margin, NothingToCompare, RunLog, RunVerdict, WarmUp, compare

NAN = math.nan


def verdict(run: RunLog | list[RunLog], base: RunLog | list[RunLog], criteria: Criteria | None = None) -> RunVerdict:
    arms = {"run": run if isinstance(run, list) else [run], "base": base if isinstance(base, list) else [base]}
    return compare(arms, "base", criteria).verdicts[0]


def test_equal_losses_are_the_same_whatever_their_number() -> None:
    for steps in (12, 1500):
        found = verdict(log(losses(steps)), log(losses(steps)))
        assert (found.verdict, found.method, found.difference, found.interval) == ("same", "equal losses", 0, (0, 0))


def test_a_few_equal_losses_are_no_evidence() -> None:
    found = verdict(log(losses(9)), log(losses(9)))
    assert found.verdict == "inconclusive" and found.needed is not None and found.needed["steps"] >= 100


def test_noise_on_the_same_batches_is_the_same() -> None:
    found = verdict(log(losses(seed=1)), log(losses(seed=2)))
    assert found.verdict == "same" and found.method == "paired steps" and found.window == (152, 1500)
    assert found.interval is not None and -0.005 < found.interval[0] < found.interval[1] < 0.005


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_one_per_cent_is_found_in_either_direction(factor: float) -> None:
    found = verdict(log(losses(seed=1, factor=factor)), log(losses(seed=2)))
    assert found.verdict == "different" and found.difference == pytest.approx(factor - 1, abs=0.002)


def test_the_rates_of_wrong_verdicts() -> None:
    """100 pairs that differ by noise: at most 5 `different`; the same pairs 1 % apart: at least 95 found."""
    pairs = [(losses(seed=2 * i, order=i), losses(seed=2 * i + 1, order=i)) for i in range(100)]
    null = [verdict(log(one), log(other)).verdict for one, other in pairs]
    assert null.count("different") + null.count("diverged") <= 5
    worse = [
        verdict(log({step: value * 1.01 if step > 50 else value for step, value in one.items()}), log(other)).verdict
        for one, other in pairs
    ]
    assert worse.count("different") >= 95


def test_an_interval_over_the_margin_is_inconclusive_with_a_number_of_steps() -> None:
    found = verdict(log(losses(seed=3, noise=0.1)), log(losses(seed=4, noise=0.1)), Criteria(Margin(0.004)))
    assert found.verdict == "inconclusive" and "reaches over" in found.reason
    assert found.needed is not None and found.needed["steps"] > 1500
    assert found.needed["steps"] % 100 == 0, "it is an estimate, so it has two digits"


def test_the_number_of_steps_that_are_needed_is_about_enough() -> None:
    """It is an estimate, which takes the mean so far for that of the longer run: about half are decided."""

    def pair(steps: int, seed: int) -> RunVerdict:
        return verdict(*(log(losses(steps, seed=seed + other, noise=0.1)) for other in (0, 500)))

    decided = []
    for seed in range(3, 27):
        short = pair(900, seed)
        assert short.verdict == "inconclusive" and short.needed is not None
        decided.append(pair(short.needed["steps"], seed).verdict)
    assert decided.count("same") >= len(decided) / 2 and "different" not in decided


def test_few_steps_are_inconclusive() -> None:
    found = verdict(log(losses(200, seed=1)), log(losses(200, seed=2)))
    assert found.verdict == "inconclusive" and found.needed == {"steps": 300} and "too few steps" in found.reason


def test_a_log_of_every_tenth_step_is_enough() -> None:
    """As the Trainer writes it: means of ten steps."""
    rows = [[*losses(1500, seed=seed, factor=factor).values()] for seed, factor in ((1, 1.0), (2, 1.0), (1, 1.02))]
    runs = [{10 * i: math.fsum(row[10 * i - 10 : 10 * i]) / 10 for i in range(1, 151)} for row in rows]
    start = Criteria(same_start=True)
    assert verdict(log(runs[0]), log(runs[1]), start).verdict == "same"
    assert verdict(log(runs[2]), log(runs[1]), start).verdict == "different"


def test_very_few_steps_do_not_tell_the_order() -> None:
    found = verdict(log(losses(40, seed=1)), log(losses(40, seed=2)))
    assert found.verdict == "inconclusive" and "too few to tell how the runs were paired" in found.reason


def test_a_margin_in_units_of_the_loss() -> None:
    pair = log(losses(seed=1, factor=1.01)), log(losses(seed=2))
    found = verdict(*pair, Criteria(Margin(0.05, relative=False)))
    assert found.verdict == "same" and found.difference == pytest.approx(0.02, abs=0.006)
    assert verdict(*pair, Criteria(Margin(0.005, relative=False))).verdict == "different"


def test_a_reward_below_zero_needs_a_margin_in_its_units() -> None:
    one, other = ({step: value - 10 for step, value in losses(seed=seed).items()} for seed in (1, 2))
    with pytest.raises(NothingToCompare, match=r"not positive.*--margin 0\.01"):
        verdict(log(one), log(other))
    assert verdict(log(one), log(other), Criteria(Margin(0.02, relative=False))).verdict == "same"


def test_a_jump_that_the_mean_hides_is_different() -> None:
    base = losses(seed=2, noise=0.02)
    late = {step: value * (1.009 if step > 1250 else 1) for step, value in losses(seed=1, noise=0.02).items()}
    found = verdict(log(late), log(base), Criteria(Margin(0.006)))
    assert found.verdict == "different" and "to the end" in found.reason


def test_a_gap_that_closes_is_not_different() -> None:
    base = losses(seed=2, noise=0.02)
    early = {step: value * (1.03 if 50 < step <= 1000 else 1) for step, value in losses(seed=1, noise=0.02).items()}
    found = verdict(log(early), log(base))
    assert found.verdict == "inconclusive" and "the mean is outside of ±0.5 %, but the last quarter" in found.reason
    lasting = {step: value * (1.03 if step > 50 else 1) for step, value in losses(seed=1, noise=0.02).items()}
    assert verdict(log(lasting), log(base)).verdict == "different"


# -- other seeds, other order -----------------------------------------------------------------------------------------


def test_one_run_each_in_another_order_proves_nothing() -> None:
    found = verdict(log(losses(order=1, seed=1)), log(losses(order=2, seed=2)))
    assert found.verdict == "inconclusive" and found.needed == {"runs": 3}
    assert "another order" in found.reason and "no gap above" in found.reason
    far = verdict(log(losses(order=1, seed=1, factor=1.03)), log(losses(order=2, seed=2)))
    assert far.verdict == "inconclusive" and far.difference == pytest.approx(0.03, abs=0.02)


def test_other_weights_at_the_start_are_not_paired() -> None:
    one, other = losses(seed=1), losses(seed=2)
    one = {step: value + (0.02 if step % 2 else -0.02) for step, value in one.items()}
    found = verdict(log(one), log(other))
    assert found.verdict == "inconclusive" and "did not start from the same weights" in found.reason
    assert verdict(log(one), log(other), Criteria(same_start=True)).verdict == "same"


def test_fp16_runs_that_skip_their_first_steps_are_paired() -> None:
    """While a loss scale settles, the weights stay, so the second loss already differs."""
    one, other = losses(seed=1), losses(seed=2)
    one.update({step: one[step] * 1.02 for step in range(2, 10)})
    assert "the same weights" in verdict(log(one), log(other)).reason
    events = tuple(skipped(step) for step in range(1, 10))
    assert verdict(log(one, events=events), log(other)).verdict == "same"


def arm(seeds: range, factor: float = 1.0, spread: float = 0.0, orders: int = 100) -> list[RunLog]:
    """Runs of one kind with different seeds, whose means differ by `spread` times -1, 0, 1, ..."""
    found = []
    for seed in seeds:
        own = factor * (1 + spread * (seed % 3 - 1))
        found.append(log(losses(600, order=orders * seed, seed=seed, factor=own), f"seed{seed}"))
    return found


def test_several_runs_are_the_unit() -> None:
    base = arm(range(10, 15))
    assert verdict(arm(range(1, 6)), base, Criteria(Margin(0.05))).verdict == "same"
    assert verdict(arm(range(1, 6), factor=1.1), base, Criteria(Margin(0.02))).verdict in ("different", "diverged")
    wide = verdict(arm(range(1, 4), spread=0.02), arm(range(10, 13), spread=0.02), Criteria(Margin(0.02)))
    assert wide.method == "separate runs, 3 and 3" and wide.verdict == "inconclusive"
    assert wide.needed is not None and wide.needed["runs"] > 3


def test_two_runs_are_too_few() -> None:
    found = verdict(arm(range(1, 3)), arm(range(10, 15)))
    assert found.verdict == "inconclusive" and found.needed == {"runs": 3} and found.interval is None


def test_seeds_that_match_are_compared_in_pairs() -> None:
    base = [log(losses(order=seed, seed=seed), f"base{seed}") for seed in range(4)]
    runs = [log(losses(order=seed, seed=seed + 50), f"run{seed}") for seed in (2, 0, 3, 1)]
    found = verdict(runs, base)
    assert (found.verdict, found.method) == ("same", "paired runs, 4 pairs")
    worse = [log(losses(order=seed, seed=seed + 50, factor=1.01), f"run{seed}") for seed in range(4)]
    assert verdict(worse, base).verdict == "different"
    one = verdict(runs[:1], base)
    assert (one.verdict, one.method) == ("same", "paired steps"), "a single run is paired with the matching baseline"


def test_many_runs_share_the_error_of_the_test() -> None:
    base = log(losses(seed=0))
    alone = compare({"a": [log(losses(seed=1))], "base": [base]}, "base").verdicts[0]
    arms = {"base": [base], **{str(seed): [log(losses(seed=seed))] for seed in range(1, 11)}}
    among = compare(arms, "base").verdicts
    assert [each.name for each in among] == [str(seed) for seed in range(1, 11)]
    widths = [each.interval[1] - each.interval[0] for each in among if each.interval]
    assert alone.interval is not None and max(widths) > 1.3 * (alone.interval[1] - alone.interval[0])
    assert {each.verdict for each in among} == {"same"}


# -- diverged ---------------------------------------------------------------------------------------------------------


def changed(loss: dict[int, float], change: dict[int, float]) -> RunLog:
    return log({**loss, **change})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict.fromkeys(range(700, 1501), NAN), "loss nan at step 700 (801 steps, every later loss too)"),
        (dict.fromkeys(range(900, 1100), math.inf), "loss inf at step 900 (200 steps, finite again after step 1099)"),
        ({1500: math.inf}, "loss inf at step 1500 (one step, every later loss too)"),
        (dict.fromkeys(range(1431, 1501), 6.0), "above the baseline from step 14"),
        (dict.fromkeys(range(1000, 1501), 6.0), "above the baseline from step"),
        (dict.fromkeys(range(1200, 1501), 0.0), "loss exactly 0 from step 1200"),
    ],
)
def test_diverged(change: dict[int, float], reason: str) -> None:
    found = verdict(changed(losses(seed=1), change), log(losses(seed=2)))
    assert found.verdict == "diverged" and reason in found.reason
    assert found.difference is None and found.interval is None


def test_a_gap_that_grows_is_divergence() -> None:
    grows = {step: value * (1 + 0.03 * step / 1500) for step, value in losses(seed=1, noise=0.01).items()}
    found = verdict(log(grows), log(losses(seed=2, noise=0.01)))
    assert found.verdict == "diverged" and "grows over the four quarters" in found.reason


def test_a_run_that_leaps_up_and_down_far_above_the_baseline_has_diverged() -> None:
    """Its own noise, of several times the loss, is no excuse."""
    leaps = {step: value * (1.7 + 30 * (step // 35 % 2 and step < 1200)) for step, value in losses(seed=1).items()}
    found = verdict(log({step: leaps[step] if step > 300 else value for step, value in losses(seed=1).items()}),
                    log(losses(seed=2)))  # fmt: skip
    assert found.verdict == "diverged" and "above the baseline from step" in found.reason


def test_a_better_run_has_not_diverged() -> None:
    better = {step: value * (1 - 0.1 * min(1, step / 500)) for step, value in losses(seed=1).items()}
    assert verdict(log(better), log(losses(seed=2)), Criteria(same_start=True)).verdict == "different"


def test_a_spike_that_passes_is_not_divergence() -> None:
    spike = dict.fromkeys(range(800, 830), 8.0)
    assert verdict(changed(losses(seed=1), spike), log(losses(seed=2))).verdict != "diverged"


def test_losses_that_are_not_finite_and_pass_are_a_spike() -> None:
    """Weights that are NaN make no finite loss: these steps were not applied, or undone."""
    run = changed(losses(seed=1), {700: NAN, 900: math.inf, 901: math.inf})
    compared = compare({"run": [run], "base": [log(losses(seed=2))]}, "base")
    found = compared.verdicts[0]
    assert found.verdict == "same" and found.spikes == ((700, 700), (900, 901))
    assert any("not finite at 3 steps from step 700 on, and finite again" in note for note in found.notes)
    assert compared.sentence(found).endswith("after 2 spikes, the first at step 700")


@pytest.mark.parametrize("begin", [0, 700])
def test_a_difference_that_drifts_away_is_different(begin: int) -> None:
    """A straight drift is no memory of the series, for which there would be too few blocks."""
    drifts = {
        step: value * (1 - 0.03 * max(0, step - begin) / (1500 - begin)) for step, value in losses(seed=1).items()
    }
    found = verdict(log(drifts), log(losses(seed=2)), Criteria(same_start=True))
    assert found.verdict == "different" and found.interval is not None and found.interval[1] < -0.005


def test_a_gradient_norm_that_is_nan_to_the_end_is_divergence() -> None:
    norms = {step: NAN if step > 1000 else 1.0 for step in range(10, 1501, 10)}
    run = dataclasses.replace(log(losses(seed=1)), grad_norm=norms)
    assert "gradient norm is not finite since step 1000" in verdict(run, log(losses(seed=2))).reason
    once = dataclasses.replace(run, grad_norm={**dict.fromkeys(norms, 1.0), 500: math.inf})
    assert verdict(once, log(losses(seed=2))).verdict == "same", "an FP16 step that was skipped"


def test_a_loss_that_is_not_finite_at_a_skipped_step_does_not_count() -> None:
    run = dataclasses.replace(changed(losses(seed=1), {900: math.inf}), events=(skipped(900),))
    found = verdict(run, log(losses(seed=2)))
    assert found.verdict == "same" and any("skipped" in note for note in found.notes)


def test_one_diverged_run_of_an_arm_is_named() -> None:
    base = [log(losses(order=seed, seed=seed)) for seed in range(3)]
    runs = [log(losses(order=seed, seed=seed + 50), f"run{seed}") for seed in range(3)]
    runs[1] = dataclasses.replace(runs[1], loss={**runs[1].loss, 1500: NAN})
    found = verdict(runs, base)
    assert found.verdict == "diverged" and found.reason.startswith("1 of 3 runs: run1.csv: loss nan at step 1500")


# -- what cannot be compared ------------------------------------------------------------------------------------------


def test_a_baseline_that_diverged_is_refused() -> None:
    with pytest.raises(NothingToCompare, match="the baseline has diverged: loss nan at step 1490"):
        verdict(log(losses()), changed(losses(), dict.fromkeys(range(1490, 1501), NAN)))


def test_runs_of_different_length_are_compared_where_both_are() -> None:
    found = verdict(log(losses(1400, seed=1)), log(losses(1500, seed=2)))
    assert found.verdict == "same" and found.window is not None and found.window[1] == 1400
    assert any("different length: to step 1400, the baseline to 1500" in note for note in found.notes)
    longer = verdict(log(losses(2500, seed=1)), log(losses(1500, seed=2)))
    assert (longer.verdict, longer.coverage) == ("same", 1.0)


@pytest.mark.parametrize(("steps", "factor"), [(200, 1.0), (1000, 1.0), (1300, 1.0), (1000, 1.03)])
def test_a_run_that_ended_early_is_neither_the_same_nor_different(steps: int, factor: float) -> None:
    found = verdict(log(losses(steps, seed=1, factor=factor)), log(losses(1500, seed=2)))
    assert found.verdict == "inconclusive" and found.needed == {"steps": 1500}
    assert found.coverage == pytest.approx(steps / 1500, abs=1e-3)
    assert f"the run ends at step {steps} of 1500" in found.reason


def test_equal_losses_of_a_run_that_ended_early_say_nothing_of_the_end() -> None:
    found = verdict(log(losses(300)), log(losses(1500)))
    assert found.verdict == "inconclusive" and "same, every loss is equal" in found.reason


def test_a_run_that_diverged_early_has_diverged() -> None:
    found = verdict(changed(losses(300), dict.fromkeys(range(200, 301), NAN)), log(losses(1500)))
    assert found.verdict == "diverged" and found.coverage is not None and found.coverage < 0.3


@pytest.mark.parametrize(("first", "size"), [(200, 0.04), (900, 0.02), (1300, 0.02), (1300, -0.02)])
def test_a_jump_to_the_end_is_different(first: int, size: float) -> None:
    run = {step: value * (1 + size * (step >= first)) for step, value in losses(seed=1, noise=0.01).items()}
    found = verdict(log(run), log(losses(seed=2, noise=0.01)))
    assert found.verdict == "different"
    if first == 1300:
        assert found.at_end is not None and found.at_end == found.reason and "from step 13" in found.reason


def test_a_jump_that_is_inside_of_the_margin_is_the_same() -> None:
    run = {step: value * (1 + 0.003 * (step >= 800)) for step, value in losses(seed=1, noise=0.005).items()}
    assert verdict(log(run), log(losses(seed=2, noise=0.005))).verdict == "same"


@pytest.mark.parametrize("size", [0.0032, -0.0032, 0.008])
def test_a_start_that_was_rounded_is_the_same_start(size: float) -> None:
    """The first losses of a pure BF16 or FP8 run, which shares weights and batches, are off by up to 1 %."""
    run = {step: value * (1 + size * math.exp(-step / 20)) for step, value in losses(seed=1).items()}
    found = verdict(log(run), log(losses(seed=2)))
    assert found.verdict == "same" and found.method == "paired steps"


def test_other_weights_of_nearly_the_same_loss_are_no_rounding() -> None:
    own = random.Random(1)
    run = {step: value + own.gauss(0, 0.03) for step, value in losses(seed=1).items()}
    found = verdict(log(run), log(losses(seed=2)))
    assert found.verdict == "inconclusive" and "did not start from the same weights" in found.reason


def test_equivalence_is_what_scipy_finds() -> None:
    """Two one-sided tests of 3 to 6 runs each, paired (one sample) and separate (Welch), at random distances."""
    stats = pytest.importorskip("scipy.stats")
    outcomes = set()
    for seed in range(16):
        draw = random.Random(seed)
        count, factor, spread = draw.randint(3, 6), 1 + draw.uniform(-0.04, 0.04), draw.choice((0.0, 0.005, 0.01))
        runs = arm(range(1, 1 + count), factor, spread)
        base = arm(range(1, 1 + count)) if seed % 2 else arm(range(50, 50 + count))
        margin = 0.03
        found = verdict(runs, base, Criteria(Margin(margin)))
        window = range(61, 601)
        ours, theirs = (
            [math.fsum(each.loss[step] for step in window) / len(window) for each in logs] for logs in (runs, base)
        )
        scale = math.fsum(theirs) / len(theirs)
        ours, theirs = [value / scale for value in ours], [value / scale for value in theirs]

        def tested(
            shift: float, side: str, ours: list[float] = ours, theirs: list[float] = theirs, paired: int = seed % 2
        ) -> float:
            moved = [value - shift for value in ours]
            if paired:
                return float(stats.ttest_rel(moved, theirs, alternative=side).pvalue)
            return float(stats.ttest_ind(moved, theirs, equal_var=False, alternative=side).pvalue)

        same = max(tested(-margin, "greater"), tested(margin, "less")) < 0.05
        different = min(tested(margin, "greater"), tested(-margin, "less")) < 0.05
        expected = "same" if same else "different" if different else "inconclusive"
        if found.verdict != "diverged":  # decided before any test
            assert found.verdict == expected, (seed, found)
            outcomes.add((found.method.split()[0], found.verdict))
    assert len(outcomes) >= 4, outcomes


def test_no_common_step() -> None:
    shifted = {step * 2 + 1: value for step, value in losses(order=1).items()}
    found = verdict(log(shifted), log({step * 2: value for step, value in losses(order=2).items()}))
    assert found.verdict == "inconclusive" and "no step is in the logs of both" in found.reason


@pytest.mark.parametrize("warm_up", [WarmUp(None, 500), WarmUp(1 / 3)])
def test_the_warm_up_is_left_out(warm_up: WarmUp) -> None:
    worse_at_first = {step: value * (1.2 if 50 < step < 450 else 1) for step, value in losses(seed=1).items()}
    pair = log(worse_at_first), log(losses(seed=2))
    found = verdict(*pair, Criteria(warm_up=warm_up))
    assert found.verdict == "same" and found.window in ((501, 1500), (502, 1500))
    assert verdict(*pair, Criteria(warm_up=WarmUp(0.0))).verdict != "same"
