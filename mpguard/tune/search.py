"""Which candidate is measured when: interleaved rounds, in which fewer and fewer candidates take part.

The first round has every candidate, in the order of the table, but those that cannot win: see `Variant.gain`. A further
round has those that are not shown to be slower than the best one, at most half of the round before. The order is
reversed from round to round: a device that becomes slower is no advantage for the first.
"""

from __future__ import annotations

from collections.abc import Callable

from mpguard.tune.candidates import TuneCandidate
from mpguard.tune.model import EQUAL, OUT_OF_MEMORY, TrialResult, TuneReport, TuneRow, is_slower

#: Starts a candidate in a round, and returns its result.
Measure = Callable[[TuneCandidate, int], TrialResult]


def search(
    report: TuneReport,
    measure: Measure,
    rounds: int,
    *,
    exhaustive: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Measure the candidates of a report, and add the results to its rows.

    rounds: at most so many. exhaustive: every candidate takes part in each of them. is_over: true when no run may begin
    any more.
    """
    for row in report.rows:
        if row.candidate.refused:
            continue
        row.note = "" if exhaustive else _futile(report, row)
        if not row.note and is_over():
            row.note = "not started: the time is over (--budget)"
        if not row.note:
            _run(report, row, measure, 1)
        report.on_change(report)
    taking_part = [row for row in report.rows if row.measured]
    for number in range(2, rounds + 1):
        taking_part = [row for row in taking_part if row.measured] if exhaustive else _contenders(report, taking_part)
        if len(taking_part) < 2:
            return
        for row in reversed(taking_part) if number % 2 == 0 else taking_part:
            if is_over():
                return
            _run(report, row, measure, number)


def _run(report: TuneReport, row: TuneRow, measure: Measure, number: int) -> None:
    report.running = row.candidate.name
    report.on_change(report)
    try:
        row.trials.append(measure(row.candidate, number))
    finally:
        report.running = ""
    report.on_change(report)


def _futile(report: TuneReport, row: TuneRow) -> str:
    """Return why a candidate need not be started; empty if it may win."""
    baselines = [other for other in report.rows if other.candidate.is_baseline and other.trials]
    reasons = {other.reason if other.state == "failed" else "" for other in baselines}
    if len(baselines) > 1 and len(reasons) == 1 and _is_of_script(reasons.pop()):
        return "not started: the script fails without FP8 as well"
    eligible = [time for other in report.eligible() if (time := other.time) is not None]
    least = _least(report, row)
    best = min(eligible, key=lambda time: time.ms, default=None)
    if best is None or least is None or least <= best.high:
        return ""
    return (
        f"not started: at best {least:.4g} ms, because it is at most {row.candidate.gain:g} times as fast as "
        f"{row.candidate.base}"
    )


def _least(report: TuneReport, row: TuneRow) -> float | None:
    """Return the shortest time that a candidate can have, by that of its base and its gain; None if not known."""
    base = next((other for other in report.rows if other.candidate.name == row.candidate.base), None)
    if base is None or (base.trials and not base.measured):
        return None
    least = time.low if (time := base.time) is not None else _least(report, base)
    return None if least is None else least / row.candidate.gain


def _contenders(report: TuneReport, last: list[TuneRow]) -> list[TuneRow]:
    """Return who takes part in the next round, of those that took part in the last; fewer than two end the search.

    The best one meets the fastest in 16 bits, or, if it is that itself, the fastest other one, at least twice: one
    measurement shows nothing where the machine is not quiet. The search ends when no other is close, or all are equal.
    """
    times = {row.candidate.name: time for row in report.eligible() if row in last and (time := row.time) is not None}
    rows = sorted((row for row in last if row.candidate.name in times), key=lambda row: times[row.candidate.name].ms)
    if not rows:
        return []
    best, baseline = rows[0], report.baseline
    close = [row for row in rows if not is_slower(row, best)][: max(2, len(last) // 2)]
    opponent = baseline if baseline is not best else next(iter(rows[1:]), None)
    if opponent is not None and opponent not in close and len(opponent.trials) == 1:
        close.append(opponent)
    slowest = max(times[row.candidate.name].ms for row in close)
    if all(len(row.trials) > 1 for row in close) and slowest <= (1 + EQUAL) * times[best.candidate.name].ms:
        return []
    return [row for row in report.rows if row in close]


def _is_of_script(reason: str) -> bool:
    """True for a failure that the script has in any precision. reason: empty if there was none."""
    return bool(reason) and not reason.startswith(OUT_OF_MEMORY)
