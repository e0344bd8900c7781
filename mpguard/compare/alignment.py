"""Put a run on the steps of its baseline: another first step number, or losses that are logged as means of some steps.

Two runs on the same batches in the same order have losses that go up and down together. If they do so at another
offset of the steps, or as means, but not as they were logged, then the loggers differ and not the batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from mpguard.compare.intervals import around_trend, correlation, correlation_around_trend
from mpguard.compare.model import LoggedEvent, RunLog

_T = TypeVar("_T")
#: Losses that go up and down together more than this had the same batches in the same order.
SAME_ORDER = 0.5
#: The fewest common points in which the order of the batches can be recognized.
MIN_COMMON = 50
#: An offset, or means, must explain a run this well, and better than any other offset by so much.
_CLEAR, _BETTER = 0.7, 0.2
#: Records that are used to find an offset, and offsets that are tried.
_RECORDS, _MOST_OFFSETS, _NEAR = 1000, 3000, 20
#: The most steps of which a logged loss is the mean.
_MOST_MEANS = 1000
#: Neighbours in smoothed losses are this much alike; in raw losses at most so much.
_SMOOTH, _RAW = 0.6, 0.25


@dataclasses.dataclass(frozen=True)
class Aligned:
    """A run and its baseline on common steps, and what was done to them, as a note; empty: nothing."""

    run: RunLog
    base: RunLog
    note: str = ""


def align(run: RunLog, base: RunLog, *, far: bool = True) -> Aligned:
    """Return the run and its baseline with an offset of steps, or a mean of several steps, taken out.

    far: search all offsets; else only those of a few steps.
    """
    as_logged = order_correlation(run.loss, base.loss)
    by_means = _as_means(run, base, as_logged)
    if by_means is not None:
        return by_means
    if as_logged > SAME_ORDER or not all(map(math.isfinite, run.loss.values())):
        return Aligned(run, base)
    offset, score = _offset(run.loss, base.loss, far=far)
    if not offset or score < max(_CLEAR, as_logged + _BETTER):
        return Aligned(run, base)
    first = min(step for step in run.loss if step + offset in base.loss)
    note = (
        f"step {first} is compared with step {first + offset} of the baseline: at this offset the losses go up and down"
        f" together (correlation {score:.2f}), at equal step numbers they do not ({as_logged:.2f})"
    )
    return Aligned(_moved(run, offset), base, note)


def order_correlation(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return how far two losses go up and down together at equal steps; 0 if there are too few or one is not finite."""
    steps = _settled(sorted(one.keys() & other.keys()))
    a, b = [one[step] for step in steps], [other[step] for step in steps]
    if len(steps) < MIN_COMMON or not all(map(math.isfinite, a)) or not all(map(math.isfinite, b)):
        return 0.0
    return correlation_around_trend(a, b)


def _settled(records: Sequence[_T]) -> Sequence[_T]:
    """Return the records without the first tenth, in which all losses fall steeply and so look alike."""
    return records[len(records) // 10 :]


def smoothed(run: RunLog, base: RunLog) -> str | None:
    """Return which of two logs has smoothed losses, "run" or "baseline"; None if neither or both."""
    memory = {"run": _neighbours(run.loss), "baseline": _neighbours(base.loss)}
    for one, other in (("run", "baseline"), ("baseline", "run")):
        if memory[one] > _SMOOTH and memory[other] < _RAW:
            return one
    return None


def _neighbours(loss: Mapping[int, float]) -> float:
    """Return the correlation of each loss with the next, around their trend."""
    values = around_trend([value for _, value in _settled(sorted(loss.items())) if math.isfinite(value)])
    return correlation(values[:-1], values[1:]) if len(values) > MIN_COMMON else 0.0


# -- offsets ----------------------------------------------------------------------------------------------------------


def _offset(run: Mapping[int, float], base: Mapping[int, float], *, far: bool) -> tuple[int, float]:
    """Return what must be added to the steps of a run, and the correlation there; 0 if no offset stands out."""
    ours, theirs = _deviations(run), _deviations(base)
    some = dict(list(ours.items())[:_RECORDS])
    scores = {offset: _score(some, theirs, offset) for offset in _offsets(list(ours), list(theirs), far=far)}
    if not scores:
        return 0, 0.0
    best = max(scores, key=scores.__getitem__)
    others = max((score for offset, score in scores.items() if abs(offset - best) > _NEAR), default=0.0)
    if scores[best] < others + _BETTER:
        return 0, 0.0
    return best, _score(ours, theirs, best)


def _deviations(loss: Mapping[int, float]) -> dict[int, float]:
    items = _settled(sorted(loss.items()))
    return dict(zip((step for step, _ in items), around_trend([value for _, value in items]), strict=True))


def _offsets(run: Sequence[int], base: Sequence[int], *, far: bool) -> Iterator[int]:
    """Yield the offsets to try: of a few steps, and those that bring the first step of one to a step of the other."""
    near = [offset for offset in range(-_NEAR, _NEAR + 1) if offset]
    yield from near
    if far:
        ends = {step - run[0] for step in base} | {base[0] - step for step in run}
        yield from sorted(ends.difference(near, (0,)), key=abs)[:_MOST_OFFSETS]


def _score(run: Mapping[int, float], base: Mapping[int, float], offset: int) -> float:
    a, b = [], []
    for step, value in run.items():
        other = base.get(step + offset)
        if other is not None:
            a.append(value)
            b.append(other)
    return correlation(a, b) if len(a) >= MIN_COMMON else 0.0


def _moved(run: RunLog, offset: int) -> RunLog:
    """Return a log whose steps are counted from another number."""

    def moved(values: Mapping[int, float]) -> dict[int, float]:
        return {step + offset: value for step, value in values.items()}

    events = tuple(
        LoggedEvent(event.kind, None if event.step is None else event.step + offset, event.text) for event in run.events
    )
    return dataclasses.replace(
        run, loss=moved(run.loss), grad_norm=moved(run.grad_norm), loss_scale=moved(run.loss_scale),
        ms=moved(run.ms), events=events,
    )  # fmt: skip


# -- means of several steps -------------------------------------------------------------------------------------------


def _as_means(run: RunLog, base: RunLog, as_logged: float) -> Aligned | None:
    """Return the two with the more frequent losses averaged, if the other log has their means."""
    one, other = _spacing(run.loss), _spacing(base.loss)
    if not one or not other or one == other:
        return None
    rare, often = (run, base) if one > other else (base, run)
    step = min(one, other)
    count, rest = divmod(max(one, other), step)
    if rest or count > _MOST_MEANS or not all(map(math.isfinite, often.loss.values())):
        return None
    found = {
        offset: _means(often.loss, rare.loss, count, step, offset)
        for offset in sorted(range(-count * step, count * step + 1, step), key=abs)
    }
    scores = {offset: order_correlation(rare.loss, means) for offset, means in found.items()}
    best = max(scores, key=scores.__getitem__)
    if scores[best] < max(_CLEAR, as_logged + (1 - as_logged) / 2):
        return None
    averaged = dataclasses.replace(often, loss=found[best])
    whose, at = ("run", "") if rare is run else ("baseline", "")
    if best:
        at = f", which end at step {_signed(best)} of it"
    note = f"each loss of the {whose} is taken as the mean of {count} steps{at}: it is compared with such means"
    return Aligned(run, averaged, note) if rare is run else Aligned(averaged, base, note)


def _signed(offset: int) -> str:
    return f"{offset:+d}".replace("+", "+ ").replace("-", "- ")


def _spacing(loss: Mapping[int, float]) -> int:
    """Return the usual number of steps from one record to the next; 0 if there are too few records."""
    gaps = sorted(after - before for before, after in pairwise(sorted(loss)))
    return gaps[len(gaps) // 2] if len(gaps) >= MIN_COMMON else 0


def _means(often: Mapping[int, float], at: Mapping[int, float], count: int, step: int, offset: int) -> dict[int, float]:
    """Return, for the steps of `at`, the mean of the `count` losses that end there, moved by an offset."""
    steps = sorted(often)
    sums = list(accumulate((often[each] for each in steps), initial=0.0))
    index = {each: i for i, each in enumerate(steps)}
    found = {}
    for each in at:
        end = index.get(each + offset)
        if end is None or end + 1 < count or steps[end] - steps[end + 1 - count] != (count - 1) * step:
            continue
        found[each] = (sums[end + 1] - sums[end + 1 - count]) / count
    return found
