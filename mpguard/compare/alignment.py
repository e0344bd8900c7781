"""Put a run on the steps of its baseline: steps of another number or unit, or losses that are means of some steps.

Two runs on the same batches in the same order have losses that go up and down together. If they do so at another
offset of the steps, in another unit of them, or as means, but not as they were logged, then the loggers differ and not
the batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from mpguard.compare.intervals import around_trend, correlation, correlation_around_trend
from mpguard.compare.model import RunLog

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
    """A run and its baseline on common steps, and what was done to them, as a note; empty: nothing.

    score: how far the losses go up and down together then.
    """

    run: RunLog
    base: RunLog
    note: str = ""
    score: float = 0.0


def align(run: RunLog, base: RunLog, *, far: bool = True) -> Aligned:
    """Return the run and its baseline with an offset of steps, or a mean of several steps, taken out.

    far: search all offsets; else only those of a few steps.
    """
    as_logged = order_correlation(run.loss, base.loss)
    found = [_as_means(run, base, as_logged)]
    if as_logged <= _CLEAR and all(map(math.isfinite, run.loss.values())):
        found += [_in_another_unit(run, base, as_logged), _at_an_offset(run, base, as_logged, far=far)]
    return max((each for each in found if each is not None), key=lambda each: each.score, default=Aligned(run, base))


def _clearly_better(score: float, as_logged: float) -> bool:
    """True if two losses go up and down together, and far less so at equal steps of the logs.

    A trend that is not quite taken out makes losses of rare records alike at any offset.
    """
    return score >= max(_CLEAR, as_logged + (1 - as_logged) / 2)


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


# -- offsets, and units of steps --------------------------------------------------------------------------------------


def _at_an_offset(run: RunLog, base: RunLog, as_logged: float, *, far: bool) -> Aligned | None:
    """Return the two with the steps of the run counted from another number, if the losses fit there."""
    offset = _offset(run.loss, base.loss, far=far)
    moved = _renumbered(run, lambda step: step + offset)
    score = order_correlation(moved.loss, base.loss)
    if not offset or not _clearly_better(score, as_logged):
        return None
    first = min(step for step in run.loss if step + offset in base.loss)
    note = (
        f"step {first} is compared with step {first + offset} of the baseline: at this offset the losses go up and down"
        f" together (correlation {score:.2f}), at equal step numbers they do not ({as_logged:.2f})"
    )
    return Aligned(moved, base, note, score)


def _in_another_unit(run: RunLog, base: RunLog, as_logged: float) -> Aligned | None:
    """Return the two on equal steps if the n-th record of one is the n-th of the other, in another unit of steps.

    Logs count micro-batches, samples, tokens or calls of a logger.
    """
    ours, theirs = _spacing(run.loss), _spacing(base.loss)
    if not ours or not theirs or ours == theirs:
        return None
    first, other = min(run.loss), min(base.loss)
    moved = _renumbered(run, lambda step: other + round((step - first) * theirs / ours))
    score = order_correlation(moved.loss, base.loss)
    near = [_renumbered(moved, lambda step, by=by: step + by * theirs).loss for by in (-2, -1, 1, 2)]  # type: ignore[misc]
    most = max(as_logged, *(order_correlation(loss, base.loss) for loss in near))
    if len(moved.loss) < len(run.loss) or not _clearly_better(score, most):
        return None
    note = (
        f"{ours} steps of the run are taken as {theirs} of the baseline, from step {first} and step {other} on: so the"
        f" losses go up and down together (correlation {score:.2f}), at equal step numbers they do not"
        f" ({as_logged:.2f})"
    )
    return Aligned(moved, base, note, score)


def _offset(run: Mapping[int, float], base: Mapping[int, float], *, far: bool) -> int:
    """Return what must be added to the steps of a run; 0 if no offset stands out."""
    ours, theirs = _deviations(run), _deviations(base)
    some = dict(list(ours.items())[:_RECORDS])
    scores = {offset: _score(some, theirs, offset) for offset in _offsets(list(ours), list(theirs), far=far)}
    if not scores:
        return 0
    best = max(scores, key=scores.__getitem__)
    others = max((score for offset, score in scores.items() if abs(offset - best) > _NEAR), default=0.0)
    return 0 if scores[best] < others + _BETTER else best


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


def _renumbered(run: RunLog, number: Callable[[int], int]) -> RunLog:
    """Return a log with other step numbers."""

    def moved(values: Mapping[int, float]) -> dict[int, float]:
        return {number(step): value for step, value in values.items()}

    events = tuple(
        dataclasses.replace(event, step=None if event.step is None else number(event.step)) for event in run.events
    )
    return dataclasses.replace(
        run, loss=moved(run.loss), grad_norm=moved(run.grad_norm), loss_scale=moved(run.loss_scale),
        ms=moved(run.ms), fp8={column: moved(values) for column, values in run.fp8.items()}, events=events,
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
    if not _clearly_better(scores[best], as_logged):
        return None
    averaged = dataclasses.replace(often, loss=found[best])
    whose, at = ("run", "") if rare is run else ("baseline", "")
    if best:
        at = f", which end at step {_signed(best)} of it"
    note = f"each loss of the {whose} is taken as the mean of {count} steps{at}: it is compared with such means"
    score = scores[best]
    return Aligned(run, averaged, note, score) if rare is run else Aligned(averaged, base, note, score)


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
