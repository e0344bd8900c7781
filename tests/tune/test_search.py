"""The search: it finds the winner of an exhaustive measurement in less than half of its time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from mpguard.policy.recipes import recipe
from mpguard.tune.candidates import CONFIGURED, TuneCandidate, candidates
from mpguard.tune.model import TrialResult, TuneReport, TuneRow
from mpguard.tune.search import search

#: Milliseconds per step, by candidate: where a name is missing, it is refused. The first two are those of
#: benchmarks/results/compile_auto.json, the next three those of causal models of transformers on the same GPU; what was
#: not measured there is in the same ratios. In the last one the libraries differ: there is no torchao.
SETUPS: Mapping[str, Mapping[str, float]] = {
    "width 4096": {
        "bf16+compile": 108.2, "bf16": 119.7, "torchao-tensorwise+compile": 85.2, "te-tensorwise": 93.4,
        "te-tensorwise+compile": 90.5, "te-delayed": 90.7, "te-blockwise": 100.2, "torchao-rowwise+compile": 99.0,
        "torchao-rowwise_with_gw_hp+compile": 101.0, "torchao-tensorwise+compile+head": 82.7,
        "torchao-tensorwise+compile+head+fast_accum": 79.1,
    },
    "width 2048": {
        "bf16+compile": 9.5, "bf16": 14.2, "torchao-tensorwise+compile": 9.7, "te-tensorwise": 31.2,
        "te-tensorwise+compile": 33.9, "te-delayed": 20.5, "te-blockwise": 33.2, "torchao-rowwise+compile": 10.4,
        "torchao-rowwise_with_gw_hp+compile": 10.4, "torchao-tensorwise+compile+head": 9.7,
        "torchao-tensorwise+compile+head+fast_accum": 9.7,
    },
    "8B blocks": {
        "bf16+compile": 99.7, "bf16": 111.0, "torchao-tensorwise+compile": 78.3, "te-tensorwise": 102.6,
        "te-tensorwise+compile": 85.1, "te-delayed": 96.0, "te-blockwise": 108.0, "torchao-rowwise+compile": 91.0,
        "torchao-rowwise_with_gw_hp+compile": 93.0, "torchao-tensorwise+compile+head": 75.5,
        "torchao-tensorwise+compile+head+fast_accum": 72.7, "bf16+compile+masters": 95.8,
        "torchao-tensorwise+compile+head+fast_accum+masters": 70.1,
    },
    "1B blocks, few tokens": {
        "bf16+compile": 21.4, "bf16": 30.0, "torchao-tensorwise+compile": 24.7, "te-tensorwise": 100.0,
        "te-tensorwise+compile": 99.0, "te-delayed": 66.0, "te-blockwise": 106.0, "torchao-rowwise+compile": 26.0,
        "torchao-rowwise_with_gw_hp+compile": 26.0, "torchao-tensorwise+compile+head": 24.5,
        "torchao-tensorwise+compile+head+fast_accum": 24.5,
    },
    "100M": {
        "bf16+compile": 38.7, "bf16": 47.0, "torchao-tensorwise+compile": 42.2, "te-tensorwise": 126.0,
        "te-tensorwise+compile": 120.0, "te-delayed": 83.0, "te-blockwise": 130.0, "torchao-rowwise+compile": 44.0,
        "torchao-rowwise_with_gw_hp+compile": 44.0, "torchao-tensorwise+compile+head": 41.0,
        "torchao-tensorwise+compile+head+fast_accum": 40.8,
    },
    "without torchao": {
        "bf16+compile": 108.2, "bf16": 119.7, "te-tensorwise": 93.4, "te-tensorwise+compile": 90.5, "te-delayed": 90.7,
        "te-blockwise": 100.2,
    },
}  # fmt: skip

WARMUP, STEPS = 10, 20


class Machine:
    """Stands for the trials: runs take the given times with noise, and cost what starting and compiling costs."""

    def __init__(self, times: Mapping[str, float], seed: int) -> None:
        self.times, self.seconds = times, 0.0
        self._random = random.Random(seed)

    def measure(self, candidate: TuneCandidate, number: int) -> TrialResult:
        ms = self.times[candidate.name] * self._random.gauss(1, 0.004)
        compiled = "compile" in candidate.name
        self.seconds += 25 + (30 if number == 1 else 8) * compiled + (WARMUP + STEPS) * ms / 1e3
        losses = tuple(2.0 + self._random.gauss(0, 0.01) for _ in range(STEPS))
        return TrialResult("measured", "", tuple(ms * self._random.gauss(1, 0.01) for _ in range(STEPS)), losses, 2**30)


def searched(times: Mapping[str, float], seed: int, *, exhaustive: bool = False) -> tuple[TuneReport, float]:
    """Return the report of a search, and its seconds."""
    times = {CONFIGURED: times["bf16"], **times}
    rows = [TuneRow(each) for each in candidates(recipe("bf16_mixed")) if each.name in times]
    report, machine = TuneReport(rows), Machine(times, seed)
    search(report, machine.measure, 3, exhaustive=exhaustive)
    return report, machine.seconds


def test_the_winner_is_that_of_an_exhaustive_search_in_less_time() -> None:
    """Within 2 % of the best, in at most 40 % of the time, and never slower than BF16: in six set-ups, five times."""
    spent = exhaustively = 0.0
    for name, times in SETUPS.items():
        for seed in range(5):
            report, seconds = searched(times, seed)
            winner = report.winner
            assert winner is not None
            best = min(times.values())
            found = times[winner.candidate.name] if winner.candidate.name in times else times["bf16"]
            assert found <= 1.02 * best, (name, seed, winner.candidate.name)
            assert found <= 1.01 * times["bf16+compile"], (name, seed)
            full, most = searched(times, seed, exhaustive=True)
            assert all(len(row.trials) == 3 for row in full.rows)
            spent, exhaustively = spent + seconds, exhaustively + most
    assert spent <= 0.40 * exhaustively, f"{spent / exhaustively:.0%}"


class BusyAtFirst(Machine):
    """Something else runs on the machine while BF16 is measured for the first time."""

    def measure(self, candidate: TuneCandidate, number: int) -> TrialResult:
        found = super().measure(candidate, number)
        slow = number == 1 and candidate.name in (CONFIGURED, "bf16+compile")
        return dataclasses.replace(found, ms=tuple(ms * 1.3 for ms in found.ms)) if slow else found


def test_one_measurement_does_not_decide() -> None:
    """FP8 that seems faster only because BF16 was disturbed does not win."""
    times = {CONFIGURED: 100.0, "bf16+compile": 90.0, "torchao-tensorwise+compile": 99.0}
    for seed in range(5):
        rows = [TuneRow(each) for each in candidates(recipe("bf16_mixed")) if each.name in times]
        report = TuneReport(rows)
        search(report, BusyAtFirst(times, seed).measure, 3)
        assert report.winner is not None and report.winner.candidate.name == "bf16+compile"
        assert [len(row.trials) for row in rows] == [1, 3, 3]


def test_no_run_begins_after_the_budget() -> None:
    """What was measured by then decides, and the rows say what was not started."""
    rows = [TuneRow(each) for each in candidates(recipe("bf16_mixed")) if each.name in SETUPS["8B blocks"]]
    report, machine = TuneReport(rows), Machine(SETUPS["8B blocks"], 0)
    search(report, machine.measure, 3, is_over=lambda: machine.seconds > 100)
    started = [row for row in rows if row.trials]
    assert [row.candidate.name for row in started] == ["bf16+compile", "torchao-tensorwise+compile"]
    assert {"not started: the time is over (--budget)"} == {
        row.note for row in rows if not row.trials and not row.note.startswith("not started: at best")
    }
    assert report.winner is started[1] and all(len(row.trials) == 1 for row in started)
