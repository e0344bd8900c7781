"""Judge runs against a baseline: same, different, diverged, or inconclusive with what is missing.

Equivalence is tested, not the absence of a difference: `same` needs an interval inside of the margin, `different` one
outside of it (two one-sided tests, 5 % each). Three designs, from the most to the least that the logs allow:

- Paired steps: one run each, the same weights at the start, the same batches in the same order. The differences of the
  losses step by step are tested; the verdict holds for these two runs.
- Paired runs: three or more such pairs with different seeds. The mean difference of a pair is the unit.
- Separate runs: three or more runs each, with other seeds or another order. The mean loss of a run is the unit (Welch).
  With fewer, neither `same` nor `different` can be stated: the seeds alone may make such a gap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from mpguard.compare.alignment import MIN_COMMON, SAME_ORDER, align, smoothed
from mpguard.compare.divergence import divergence, not_finite, skipped_steps
from mpguard.compare.intervals import (
    MIN_BLOCK,
    MIN_BLOCKS,
    MeanEstimate,
    block_mean_estimate,
    correlation,
    correlation_around_trend,
    jump,
    mean_estimate,
    t_quantile,
    t_upper_tail,
)
from mpguard.compare.model import MIN_COVERAGE, Comparison, Margin, RunLog, RunVerdict, VerdictKind
from mpguard.compare.spikes import not_finite as not_finite_spikes
from mpguard.compare.spikes import spikes
from mpguard.compare.units import other_unit
from mpguard.core.errors import MpguardError

#: The error of each one-sided test.
ALPHA = 0.05
#: Runs from the same weights differ by less than this, relative, in the first records of their losses.
SAME_START, _FIRST = 0.0005, 3
#: Weights or matmuls that are rounded to BF16 or FP8 may differ by this much, if the changes of the losses from
#: record to record are as good as equal in the first ones (correlation; other weights: at most 0.97, E5M2: 0.997).
ROUNDED_START, _SAME_CHANGES, _EARLY = 0.01, 0.995, 50
#: The fewest runs of an arm whose seeds or order differ, and the fewest equal records that count as equality.
MIN_RUNS, MIN_EQUAL = 3, 10
_MOST_NEEDED_RUNS = 1000
#: After a jump the end is judged from so many blocks on, which its interval allows for.
_END_BLOCKS = 7
#: The method where nothing has to be tested.
EQUAL = "equal losses"


class NothingToCompare(MpguardError):
    """A baseline that cannot be one, or runs that have nothing in common with it."""


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """The beginning that is left out: a share of the common steps, or so many steps.

    A tenth is what the learning rate's warm-up takes at most in usual recipes. Each further record makes the error of
    the mean smaller, and chaos makes two runs of one recipe differ least in the first part: to leave out a fifth finds
    fewer of the runs that are worse, and confirms fewer that are the same (docs/compare.md).
    """

    share: float | None = 0.1
    steps: int = 0

    def last(self, steps: Sequence[int]) -> int:
        """Return the last step of the warm-up among the common steps, which are sorted."""
        return steps[0] + round(self.share * (steps[-1] - steps[0])) if self.share is not None else self.steps


@dataclasses.dataclass(frozen=True)
class Criteria:
    """What is compared and how strictly. `same_start`: the runs began with the same weights, whatever the logs show."""

    margin: Margin = dataclasses.field(default_factory=Margin)
    warm_up: WarmUp = dataclasses.field(default_factory=WarmUp)
    same_start: bool = False


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A difference before it is judged: its estimate, how it was measured, and what would make it conclusive."""

    estimate: MeanEstimate | None
    method: str
    reason: str = ""
    needed: Mapping[str, int] | None = None
    window: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    #: Steps from one record to the next; 0: the unit is the run.
    spacing: float = 0.0
    #: The runs of the smaller arm, where the unit is the run.
    runs: int = 1
    #: The difference in the last quarter of the window, or from a jump in it to the end.
    at_end: MeanEstimate | None = None
    #: The first and last steps of spikes that are left out.
    spikes: tuple[tuple[int, int], ...] = ()
    #: The step from which the difference is another, if it jumps.
    jump: int | None = None


def compare(
    arms: Mapping[str, Sequence[RunLog]],
    baseline: str,
    criteria: Criteria | None = None,
) -> Comparison:
    """Return the verdict on each arm of runs against that of the baseline.

    Raises `NothingToCompare` if the baseline's loss is not finite, or if a relative margin has no meaning.
    """
    criteria = criteria or Criteria()
    base = [_without_passing(log) for log in arms[baseline]]
    for log in base:
        _check_baseline(log, criteria.margin)
    found: dict[str, RunVerdict | _Measured] = {}
    pairs: dict[str, _Aligned] = {}
    for name, logs in arms.items():
        if name != baseline:
            pairs[name] = each = _aligned([_without_passing(log) for log in logs], base)
            found[name] = (
                _in_another_unit(name, each.runs, each.base)
                or _diverged(name, each.runs, each.base, criteria)
                or _measure(each.runs, each.base, criteria)
            )
    judged = _judge({name: each for name, each in found.items() if isinstance(each, _Measured)}, criteria)
    verdicts = tuple(
        _covered(each if isinstance(each, RunVerdict) else judged[name], pairs[name], base, arms[name])
        for name, each in found.items()
    )
    return Comparison(baseline, criteria.margin, verdicts, {name: tuple(logs) for name, logs in arms.items()})


@dataclasses.dataclass(frozen=True)
class _Aligned:
    """The runs of an arm and its baseline on common steps, and what was done to them."""

    runs: Sequence[RunLog]
    base: Sequence[RunLog]
    notes: tuple[str, ...] = ()


def _aligned(runs: Sequence[RunLog], base: Sequence[RunLog]) -> _Aligned:
    found, others, notes = list(runs), list(base), []
    far = len(runs) == len(base) == 1
    for i, run in enumerate(runs):
        for j in range(len(base)):
            each = align(run, others[j], far=far)
            if each.note:
                found[i], others[j] = each.run, each.base
                notes.append(each.note if len(runs) == 1 else f"{run.path.name}: {each.note}")
                break
    return _Aligned(found, others, tuple(notes))


def _covered(verdict: RunVerdict, pair: _Aligned, base: Sequence[RunLog], logs: Sequence[RunLog]) -> RunVerdict:
    """Return a verdict with what was left out, and how far the run goes: one that ended early says nothing of the end.

    logs: of the run, as they were read.
    """
    passing = [ends for log in logs for ends in _not_finite(log)]
    verdict = dataclasses.replace(verdict, spikes=tuple(sorted((*passing, *verdict.spikes))))
    verdict = dataclasses.replace(verdict, notes=tuple(dict.fromkeys((*pair.notes, *verdict.notes))))
    if pair.notes:
        verdict = dataclasses.replace(verdict, compared=(tuple(pair.runs), tuple(pair.base)))
    common = _common([*pair.runs, *pair.base])
    first, last = min(min(log.loss) for log in base), max(max(log.loss) for log in base)
    if not common or first == last:
        return verdict
    coverage = max(0.0, min(1.0, (common[-1] - first) / (last - first)))
    verdict = dataclasses.replace(verdict, coverage=round(coverage, 4))
    if coverage >= MIN_COVERAGE or verdict.verdict == "diverged":
        return verdict
    until = f": {verdict.verdict}, {verdict.reason}" if verdict.verdict != "inconclusive" else f": {verdict.reason}"
    reason = f"the run ends at step {common[-1]} of {last} ({coverage:.0%} of the baseline); up to there{until}"
    return dataclasses.replace(verdict, verdict="inconclusive", reason=reason, needed={"steps": last})


def _check_baseline(log: RunLog, margin: Margin) -> None:
    reason = not_finite(log)
    if reason is not None:
        raise NothingToCompare(
            f"{log.path}: the baseline has diverged: {reason}. Give a run that trains as the baseline"
        )
    if not log.loss:
        raise NothingToCompare(f"{log.path}: the baseline has no loss")
    if margin.relative and math.fsum(log.loss.values()) <= 0:
        raise NothingToCompare(
            f"{log.path}: the mean loss of the baseline is not positive, so a margin in per cent has no meaning;"
            " give one in units of the loss: `--margin 0.01`"
        )


def _without_passing(log: RunLog) -> RunLog:
    """Return a log without losses that are not finite and did not last: of skipped steps, and of those that pass."""
    skipped = {step for step in skipped_steps(log) if not math.isfinite(log.loss.get(step, 0.0))}
    passing = {step for first, last in _not_finite(log) for step in log.loss if first <= step <= last} - skipped
    notes = list(log.notes)
    if skipped:
        notes.append(f"{len(skipped)} losses that are not finite are left out: the log reports these steps as skipped")
    if passing:
        at = f"step {min(passing)}" if len(passing) == 1 else f"{len(passing)} steps from step {min(passing)} on"
        notes.append(f"the loss is not finite at {at}, and finite again to the end: left out of the test")
    if not skipped and not passing:
        return log
    kept = {step: value for step, value in log.loss.items() if step not in skipped | passing}
    return dataclasses.replace(log, loss=kept, notes=tuple(notes))


def _not_finite(log: RunLog) -> list[tuple[int, int]]:
    """Return the first and last steps of stretches of losses that are not finite, and that a run recovers from."""
    skipped = skipped_steps(log)
    steps = [step for step in sorted(log.loss) if step not in skipped]
    return [(steps[each.first], steps[each.last]) for each in not_finite_spikes([log.loss[step] for step in steps])]


def _in_another_unit(name: str, runs: Sequence[RunLog], base: Sequence[RunLog]) -> RunVerdict | None:
    """Return the verdict on an arm whose loss is not in the unit of the baseline's: no margin has a meaning then."""
    found = [other_unit(run.loss, base[0].loss) for run in runs]
    reason = next((each for each in found if each is not None), None)
    if reason is None or None in found:
        return None
    reason += ". Log the same one in both, or name another column: `--loss`"
    return RunVerdict(name, "inconclusive", None, None, "none", reason, notes=_notes(runs, base))


def _diverged(name: str, runs: Sequence[RunLog], base: Sequence[RunLog], criteria: Criteria) -> RunVerdict | None:
    """Return the verdict on an arm in which a run diverged."""
    reasons = []
    for run in runs:
        partner = _partners([run], base, criteria.warm_up)[0] or base[0]
        steps = _common([run, partner])
        reason = divergence(run, partner, criteria.warm_up.last(steps) if steps else 0, criteria.margin)
        if reason is not None:
            reasons.append(reason if len(runs) == 1 else f"{run.path.name}: {reason}")
    if not reasons:
        return None
    count = f"{len(reasons)} of {len(runs)} runs: " if len(runs) > 1 else ""
    return RunVerdict(name, "diverged", None, None, "divergence", count + "; ".join(reasons), notes=_notes(runs, base))


def _common(logs: Sequence[RunLog]) -> list[int]:
    return sorted(set.intersection(*(set(log.loss) for log in logs)))


def _notes(runs: Sequence[RunLog], base: Sequence[RunLog]) -> tuple[str, ...]:
    """Return what limits the comparison: what the readers report, and runs of different length."""
    notes = [note for log in runs for note in log.notes]
    for run in runs:
        if run.loss and base[0].loss and max(run.loss) != max(base[0].loss):
            notes.append(
                f"runs of different length: to step {max(run.loss)}, the baseline to {max(base[0].loss)};"
                " only common steps are compared"
            )
    return tuple(dict.fromkeys(notes))


# -- which design the logs allow --------------------------------------------------------------------------------------


def _measure(runs: Sequence[RunLog], base: Sequence[RunLog], criteria: Criteria) -> _Measured:
    margin, warm_up = criteria.margin, criteria.warm_up
    notes = _notes(runs, base)
    steps = _common([*runs, *base])
    if not steps:
        reason = "no step is in the logs of both; compare runs that log at the same steps"
        return _Measured(None, "none", reason, notes=notes)
    partners = _partners(runs, base, warm_up)
    pairs = [(run, partner) for run, partner in zip(runs, partners, strict=True) if partner is not None]
    if len(runs) == 1 and pairs and (criteria.same_start or _same_start(*pairs[0])):
        found = _paired_steps(*pairs[0], margin, warm_up)
        return dataclasses.replace(found, notes=(*found.notes, *notes))
    last = warm_up.last(steps)
    window = [step for step in steps if step > last]
    if not window:
        return _Measured(None, "none", "the warm-up leaves no common step", notes=notes)
    if len(pairs) == len(runs) >= MIN_RUNS:
        found = _paired_runs(pairs, window, margin)
    elif len(runs) == len(base) == 1 and len(window) < MIN_COMMON:
        reason = f"{len(window)} common records after the warm-up are too few to tell how the runs were paired"
        spacing = (steps[-1] - steps[0]) / max(1, len(steps) - 1)
        estimate = MeanEstimate(_mean(runs[0], window) - _mean(base[0], window), math.inf, 1, MIN_BLOCK, False)
        estimate = dataclasses.replace(estimate, mean=estimate.mean / _scale(base, window, margin))
        found = _Measured(estimate, "none", "", None, (window[0], window[-1]), spacing=spacing)
        found = dataclasses.replace(found, reason=reason, needed=_needed_steps(found, criteria, 0.0))
    else:
        found = _separate_runs(runs, base, window, margin, bool(pairs))
    return dataclasses.replace(found, notes=notes, window=(window[0], window[-1]))


def _partners(runs: Sequence[RunLog], base: Sequence[RunLog], warm_up: WarmUp) -> list[RunLog | None]:
    """Return for each run the baseline that had the same batches in the same order; each baseline is used once."""
    scores = []
    for i, run in enumerate(runs):
        for j, other in enumerate(base):
            score = _order_correlation(run, other, warm_up)
            if score > SAME_ORDER:
                scores.append((score, i, j))
    chosen: dict[int, int] = {}
    for _, i, j in sorted(scores, reverse=True):
        if i not in chosen and j not in chosen.values():
            chosen[i] = j
    return [base[chosen[i]] if i in chosen else None for i in range(len(runs))]


def _order_correlation(run: RunLog, other: RunLog, warm_up: WarmUp) -> float:
    if _equal(run, other):
        return 1.0
    steps = _common([run, other])
    steps = [step for step in steps if step > warm_up.last(steps)] if steps else []
    a, b = [run.loss[step] for step in steps], [other.loss[step] for step in steps]
    if len(steps) < MIN_COMMON or not all(map(math.isfinite, a)):
        return 0.0
    return correlation_around_trend(a, b)


def _equal(run: RunLog, other: RunLog) -> bool:
    steps = run.loss.keys() & other.loss.keys()
    return len(steps) >= MIN_EQUAL and all(run.loss[step] == other.loss[step] for step in steps)


def _same_start(run: RunLog, other: RunLog) -> bool:
    """True if two runs begin with the same weights: with others, the first losses on equal batches already differ."""
    skipped = min(skipped_steps(run) | skipped_steps(other), default=math.inf)  # after it, one has fewer updates
    steps = _common([run, other])
    first, *more = steps[:_FIRST]
    gap = _first_gap(run, other, [first, *(step for step in more if step <= skipped)])
    return gap < SAME_START or (gap < ROUNDED_START and _same_changes(run, other, steps[:_EARLY]) > _SAME_CHANGES)


def _first_gap(run: RunLog, other: RunLog, steps: Sequence[int]) -> float:
    """Return the relative difference of the first losses, as a root mean square."""
    gaps = [(run.loss[step] - other.loss[step]) / (abs(other.loss[step]) or 1.0) for step in steps]
    return math.sqrt(math.fsum(gap * gap for gap in gaps) / len(gaps))


def _same_changes(run: RunLog, other: RunLog, steps: Sequence[int]) -> float:
    """Return the correlation of the changes of changes of two losses, in which no trend is left; 0 if too few.

    Rounding moves the loss of every batch by about as much; other weights find other batches hard.
    """
    if len(steps) < _EARLY:
        return 0.0
    bends = [
        [log.loss[a] - 2 * log.loss[b] + log.loss[c] for a, b, c in zip(steps, steps[1:], steps[2:], strict=False)]
        for log in (run, other)
    ]
    return correlation(bends[0], bends[1])


# -- the three designs ------------------------------------------------------------------------------------------------


def _paired_steps(run: RunLog, base: RunLog, margin: Margin, warm_up: WarmUp) -> _Measured:
    """Measure the differences step by step of two runs on the same batches."""
    steps = _common([run, base])
    last = warm_up.last(steps)
    steps = [step for step in steps if step > last]
    window = (steps[0], steps[-1]) if steps else None
    if _equal(run, base):
        zero = MeanEstimate(0.0, 0.0, math.inf, 1, True)
        return _Measured(zero, EQUAL, window=window)
    method = "paired steps"
    if len(steps) < 2:
        return _Measured(None, method, "the warm-up leaves no common step", window=window)
    scale = _scale([base], steps, margin)
    gaps = [(run.loss[step] - base.loss[step]) / scale for step in steps]
    spacing = (steps[-1] - steps[0]) / (len(steps) - 1)
    found = spikes(gaps, margin.value)
    notes = tuple(
        f"a spike at steps {steps[each.first]} to {steps[each.last]}, up to {margin.shown(each.peak)}, is recovered"
        " from: these steps are left out of the test"
        for each in found
    )
    ends = tuple((steps[each.first], steps[each.last]) for each in found)
    out = {i for each in found for i in range(each.first, each.last + 1)}
    steps = [step for i, step in enumerate(steps) if i not in out]
    gaps = [gap for i, gap in enumerate(gaps) if i not in out]
    end, at = len(gaps) - max(1, len(gaps) // 4), jump(gaps)
    if at is not None and len(gaps) - at >= len(gaps) // 10:
        end = max(end, at)
    return _Measured(
        mean_estimate(gaps), method, window=window, notes=notes, spacing=spacing, spikes=ends,
        at_end=mean_estimate(gaps[end:]), jump=None if at is None else steps[at],
    )  # fmt: skip


def _paired_runs(pairs: Sequence[tuple[RunLog, RunLog]], window: Sequence[int], margin: Margin) -> _Measured:
    scale = _scale([base for _, base in pairs], window, margin)
    gaps = [(_mean(run, window) - _mean(base, window)) / scale for run, base in pairs]
    return _Measured(_mean_of_runs(gaps), f"paired runs, {len(pairs)} pairs", runs=len(pairs))


def _separate_runs(
    runs: Sequence[RunLog], base: Sequence[RunLog], window: Sequence[int], margin: Margin, same_order: bool
) -> _Measured:
    """Measure the difference between the means of separate runs; with fewer than three each, only its size."""
    scale = _scale(base, window, margin)
    ours = [_mean(run, window) / scale for run in runs]
    theirs = [_mean(run, window) / scale for run in base]
    method = f"separate runs, {len(ours)} and {len(theirs)}"
    if min(len(ours), len(theirs)) >= MIN_RUNS:
        estimate = _welch(_mean_of_runs(ours), _mean_of_runs(theirs))
        return _Measured(estimate, method, runs=min(len(ours), len(theirs)))
    needed: dict[str, int] | None = {"runs": MIN_RUNS}
    if len(ours) == len(theirs) == 1:
        gaps = [(runs[0].loss[step] - base[0].loss[step]) / scale for step in window]  # the trend of both is the same
        estimate = dataclasses.replace(block_mean_estimate(gaps), enough=False)
        most = abs(estimate.mean) + estimate.half_width(ALPHA)
        why = (
            "the runs had the same batches, but did not start from the same weights"
            " (`--same-start` if they did, and the log begins later)"
            if same_order
            else "the runs had other batches, or another order of them"
        )
        which = None if same_order else smoothed(runs[0], base[0])
        if which is not None:
            why = f"the losses of the {which} are smoothed, those of the other are not: log the raw loss of each step"
            needed = None
        reason = f"{why}; no gap above {margin.shown(most).lstrip('+')} between these two, and seeds alone may make one"
        return _Measured(estimate, method, reason, needed)
    reason = f"a gap between seeds can be judged from {MIN_RUNS} runs on each side: NAME=RUN NAME=RUN ..."
    gap = math.fsum(ours) / len(ours) - math.fsum(theirs) / len(theirs)
    return _Measured(MeanEstimate(gap, math.inf, 1, 1, False), method, reason, needed)


def _scale(base: Sequence[RunLog], steps: Sequence[int], margin: Margin) -> float:
    """Return what differences are divided by: the baseline's mean loss, or 1 for a margin in units of the loss."""
    return math.fsum(_mean(log, steps) for log in base) / len(base) if margin.relative else 1.0


def _mean(log: RunLog, steps: Sequence[int]) -> float:
    return math.fsum(log.loss[step] for step in steps) / len(steps)


def _mean_of_runs(values: Sequence[float]) -> MeanEstimate:
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return MeanEstimate(mean, math.sqrt(variance / n), n - 1, 1, n >= MIN_RUNS)


def _welch(one: MeanEstimate, other: MeanEstimate) -> MeanEstimate:
    a, b = one.error**2, other.error**2
    freedom = (a + b) ** 2 / (a * a / one.freedom + b * b / other.freedom) if a + b else math.inf
    return MeanEstimate(one.mean - other.mean, math.sqrt(a + b), freedom, 1, one.enough and other.enough)


# -- the tests --------------------------------------------------------------------------------------------------------


def _judge(measured: Mapping[str, _Measured], criteria: Criteria) -> dict[str, RunVerdict]:
    """Return the verdicts. With several arms the errors are divided as Holm does: the clearest is tested first.

    Once one is inconclusive, the less clear ones are tested with the same share of the error.
    """
    values = {name: _p_value(each, criteria.margin) for name, each in measured.items()}
    judged: dict[str, RunVerdict] = {}
    left = sum(value < 1 for value in values.values())
    for name in sorted(values, key=values.__getitem__):
        judged[name] = _judged(name, measured[name], criteria, ALPHA / max(1, left))
        left -= judged[name].verdict != "inconclusive"
    return judged


def _p_value(found: _Measured, margin: Margin) -> float:
    """Return the p-value of the better of both claims, inside the margin or outside; 1 if neither can be tested."""
    estimate = found.estimate
    if estimate is None or found.reason or not estimate.enough:
        return 1.0
    if not estimate.error:
        return 0.0
    distance = abs(abs(estimate.mean) - margin.value) / estimate.error
    return t_upper_tail(distance, min(estimate.freedom, 1e6))


def _judged(name: str, found: _Measured, criteria: Criteria, alpha: float) -> RunVerdict:
    estimate = found.estimate
    if estimate is None:
        return RunVerdict(
            name, "inconclusive", None, None, found.method, found.reason, found.needed, found.window, found.notes
        )
    half = estimate.half_width(alpha)
    interval = (estimate.mean - half, estimate.mean + half) if math.isfinite(half) else None
    outcome, reason, needed = _outcome(found, estimate, interval, criteria, alpha)
    verdict = RunVerdict(
        name, outcome, estimate.mean, interval, found.method, reason, needed, found.window, found.notes
    )
    verdict = dataclasses.replace(verdict, spikes=found.spikes)
    at_end = _at_end(found, criteria.margin, alpha)
    if at_end is None or outcome not in ("same", "inconclusive") or found.reason:
        return verdict
    return dataclasses.replace(verdict, verdict="different", reason=at_end, needed=None, at_end=at_end)


def _at_end(found: _Measured, margin: Margin, alpha: float) -> str | None:
    """Return that the run is another after a jump, in words; None if there is no jump, or the end may be the same."""
    end = found.at_end
    if found.jump is None or end is None or end.freedom < _END_BLOCKS:
        return None
    if abs(end.mean) - end.half_width(alpha / 2) <= margin.value:
        return None
    return f"from step {found.jump} to the end {margin.shown(end.mean)}, outside of ±{margin}"


def _outcome(
    found: _Measured,
    estimate: MeanEstimate,
    interval: tuple[float, float] | None,
    criteria: Criteria,
    alpha: float,
) -> tuple[VerdictKind, str, Mapping[str, int] | None]:
    """Return the verdict, its reason, and what is needed if it is inconclusive."""
    margin = criteria.margin
    if found.reason:
        return "inconclusive", found.reason, found.needed
    if found.method == EQUAL:
        return "same", "every loss is equal", None
    if interval is None or not estimate.enough:
        reason = "too few steps for an interval that can be trusted"
        if estimate.block > MIN_BLOCK:
            reason += f": the difference drifts, over {estimate.block} records and more"
        return "inconclusive", reason, _needed_steps(found, criteria, 0.0)
    low, high = interval
    at_end = found.at_end
    if low > margin.value or high < -margin.value:
        if at_end is not None and abs(at_end.mean) + at_end.half_width(alpha) < margin.value:
            reason = f"the mean is outside of ±{margin}, but the last quarter is at {margin.shown(at_end.mean)}"
            return "inconclusive", reason, _needed_steps(found, criteria, 0.0)
        return "different", f"outside of ±{margin}", None
    if low < -margin.value or high > margin.value:
        return (
            "inconclusive",
            f"the interval reaches over the margin of ±{margin}",
            _needed(found, estimate, criteria, alpha),
        )
    if at_end is not None and abs(at_end.mean) > margin.value:
        reason = f"the mean is inside of ±{margin}, but the last quarter is at {margin.shown(at_end.mean)}"
        return "inconclusive", reason, _needed_steps(found, criteria, 0.0)
    return "same", f"inside of ±{margin}", None


def _needed(found: _Measured, estimate: MeanEstimate, criteria: Criteria, alpha: float) -> dict[str, int]:
    """Return how many steps, or runs, make an interval that does not reach over the margin, if the mean stays."""
    margin = criteria.margin.value
    wanted = max(abs(abs(estimate.mean) - margin), margin / 10)
    if found.spacing:
        return _needed_steps(found, criteria, (estimate.half_width(alpha) / wanted) ** 2)
    now = found.runs
    for runs in range(now + 1, _MOST_NEEDED_RUNS):
        freedom = estimate.freedom * (runs - 1) / (now - 1)
        if t_quantile(1 - alpha, freedom) * estimate.error * math.sqrt(now / runs) <= wanted:
            return {"runs": runs}
    return {"runs": _MOST_NEEDED_RUNS}


def _needed_steps(found: _Measured, criteria: Criteria, factor: float) -> dict[str, int]:
    """Return the length of runs, in steps, whose window is `factor` times as long and has enough blocks.

    At least half as long again as now, rounded up to two digits: an estimate.
    """
    if found.window is None or found.estimate is None:
        raise AssertionError("steps are estimated from a window")
    length = found.window[1] - found.window[0] + found.spacing
    wanted = max(length * factor, MIN_BLOCKS * found.estimate.block * found.spacing, length * 1.5)
    share = criteria.warm_up.share
    steps = wanted / (1 - share) if share is not None else wanted + criteria.warm_up.steps
    digits = 10 ** max(0, len(str(int(steps))) - 2)
    return {"steps": math.ceil(steps / digits) * digits}
