"""Recognize a run that diverged: a loss that is not finite, far above the baseline to the end, or drifting away."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mpguard.compare.model import Margin, RunLog
from mpguard.compare.spikes import noise_of

#: A gap counts as large from this share of the baseline's loss, and from so many standard deviations of its noise.
LARGE_GAP, LARGE_DEVIATIONS = 0.05, 6.0
#: The common steps are divided into so many parts, of at least so many points.
_PARTS, _MIN_POINTS = 40, 5
#: A gap of so many times the least is divergence in the last two parts alone.
_SUDDEN = 4.0
#: A growth from one quarter to the next counts if it is so many standard errors.
_GROWTH_ERRORS = 2.0
#: A gradient norm that is not finite in this many records at the end belongs to weights that are not finite.
_END = 3


def divergence(run: RunLog, base: RunLog, warm_up: int, margin: Margin) -> str | None:
    """Return the reason why a run counts as diverged from the baseline; None if it does not.

    warm_up: the last step of the warm-up, in which gaps do not count.
    """
    found = not_finite(run)
    if found is not None:
        return found
    steps = [step for step in sorted(run.loss.keys() & base.loss.keys()) if step > warm_up]
    if len(steps) < 4 * _MIN_POINTS:
        return None
    return _large_to_the_end(run.loss, base.loss, steps) or _grows(run.loss, base.loss, steps, margin)


def not_finite(run: RunLog) -> str | None:
    """Return the reason if a run has a loss, or to its end a gradient norm, that is not finite.

    A step that the log reports as skipped has changed no weight, so its loss does not count.
    """
    skipped = skipped_steps(run)
    bad = [step for step, value in run.loss.items() if not math.isfinite(value) and step not in skipped]
    if bad:
        rest = "every later loss too" if bad[-1] == max(run.loss) else f"finite again after step {bad[-1]}"
        count = f"{len(bad)} steps" if len(bad) > 1 else "one step"
        return f"loss {run.loss[bad[0]]} at step {bad[0]} ({count}, {rest})"
    norms = sorted(run.grad_norm.items())
    if len(norms) >= _END and not any(math.isfinite(value) for _, value in norms[-_END:]):
        last = max((step for step, value in norms if math.isfinite(value)), default=None)
        since = f"since step {last}" if last is not None else "in the whole log"
        return f"the gradient norm is not finite {since}; the logged loss hides it"
    zeros = _hidden_by_trainer(run)
    if zeros is not None:
        return f"loss exactly 0 from step {zeros} to the end: how the Trainer logs NaN (`logging_nan_inf_filter`)"
    return None


def skipped_steps(run: RunLog) -> set[int]:
    """Return the steps that the log's events report as skipped."""
    return {event.step for event in run.events if event.step is not None and "skip" in event.kind.lower()}


def _hidden_by_trainer(run: RunLog) -> int | None:
    """Return the first step of a loss that is exactly 0 to the end, after one that was not.

    The Trainer replaces a NaN by the mean of the losses since the last record, which is 0 if all were NaN.
    """
    losses = sorted(run.loss.items())
    tail = len(losses)
    while tail and losses[tail - 1][1] == 0.0:
        tail -= 1
    return losses[tail][0] if 0 < tail < len(losses) - 1 else None


def _large_to_the_end(run: Mapping[int, float], base: Mapping[int, float], steps: Sequence[int]) -> str | None:
    size = max(_MIN_POINTS, len(steps) // _PARTS)
    parts = _parts(steps[len(steps) % size :], size)  # the last step is in the last part
    gaps = [_relative_gap(run, base, part) for part in parts]
    # A run that leaps up and down is noisy because it diverged: the noise that counts is at most that of two runs which
    # are as noisy as the baseline, and have other batches.
    level = math.fsum(base[step] for step in steps) / len(steps)
    usual = noise_of([math.fsum(base[step] for step in part) / len(part) for part in parts]) / abs(level or 1.0)
    least = max(LARGE_GAP, LARGE_DEVIATIONS * min(noise_of(gaps), math.sqrt(2) * usual))
    first = len(gaps)
    while first and gaps[first - 1] >= least:
        first -= 1
    if len(gaps) - first < max(3, len(gaps) // 10) and min(gaps[-2:]) < _SUDDEN * least:
        return None
    mean = math.fsum(gaps[first:]) / (len(gaps) - first)
    return f"loss {mean * 100:.3g} % above the baseline from step {parts[first][0]} to the end"


def _grows(run: Mapping[int, float], base: Mapping[int, float], steps: Sequence[int], margin: Margin) -> str | None:
    """Return the reason if the gap grows from each quarter to the next, and ends outside of the margin."""
    size = max(_MIN_POINTS, len(steps) // _PARTS)
    if len(steps) < 4 * 3 * size:
        return None
    length = len(steps) // 4
    quarters = [
        [_relative_gap(run, base, part) for part in _parts(steps[i * length : (i + 1) * length], size)]
        for i in range(4)
    ]
    means = [math.fsum(quarter) / len(quarter) for quarter in quarters]
    errors = [
        math.sqrt(math.fsum((gap - mean) ** 2 for gap in quarter) / (len(quarter) - 1) / len(quarter))
        for quarter, mean in zip(quarters, means, strict=True)
    ]
    last = steps[-length:]
    at_end = means[-1] if margin.relative else math.fsum(run[step] - base[step] for step in last) / length
    grown = all(means[i + 1] - means[i] > _GROWTH_ERRORS * math.hypot(errors[i], errors[i + 1]) for i in range(3))
    if not grown or at_end <= margin.value:
        return None
    shown = ", ".join(f"{mean * 100:.2g}" for mean in means)
    return f"the gap to the baseline grows over the four quarters of the run: {shown} %"


def _parts(steps: Sequence[int], size: int) -> list[Sequence[int]]:
    return [steps[i : i + size] for i in range(0, len(steps) - size + 1, size)]


def _relative_gap(run: Mapping[int, float], base: Mapping[int, float], steps: Sequence[int]) -> float:
    """Return the mean loss of a run at some steps above that of the baseline, as a share of it."""
    reference = math.fsum(base[step] for step in steps)
    gap = math.fsum(run[step] for step in steps) - reference
    return gap / abs(reference) if reference else math.copysign(math.inf, gap) if gap else 0.0
