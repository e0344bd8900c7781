"""Which steps are checked, and the line about the whole run."""

from __future__ import annotations

import pytest

from mpguard.runtime import progress
from mpguard.runtime.progress import Budget, Progress, summary


def proven(clock: list[float], cost: float = 0.0) -> Progress:
    one = Progress("AdamW", applied=1, cost=cost)
    one.prove(agrees=False)
    one.checks.append(1)
    return one


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_one_step_of_each_doubling_is_checked(clock: list[float]) -> None:
    budget, one = Budget(), proven(clock)
    assert one.next_check == 2
    for applied, look in ((2, 4), (3, 4), (4, 8), (8, 16)):
        one.applied = applied
        assert one.propose(budget) == look
    schedule = [1]
    while schedule[-1] < 2**16:
        schedule.append(progress.scheduled_after(schedule[-1]))
    assert [step.bit_length() for step in schedule] == list(range(1, len(schedule) + 1))
    assert all(any(step % period == 0 for step in schedule) for period in (3, 5, 6, 7)), schedule
    assert progress.scheduled_after(schedule[7] - 1) == schedule[7] and progress.scheduled_after(0) == 1


def test_looks_that_would_take_more_than_their_share_come_later(clock: list[float]) -> None:
    """A check of 1.5 s: half a second is free, the rest is 1 % of 100 s. Steps take 1 s."""
    budget, one = Budget(), proven(clock, cost=1.5)
    one.applied, clock[0] = 4, 103.0
    assert 128 <= one.propose(budget) < 160, "the first after 100 s"
    budget.spent = 3.0
    assert 512 <= one.propose(budget) < 640, "4.5 s in total: 0.5 s free, and 1 % of 400 s"
    assert not budget.allows(0.1) and Budget().allows(0.5)
    one.applied = 7
    assert summary([one]) == "in force at step 1 of 7 (1 check)", "the next one would have been at step 8"
    one.applied = 250
    assert summary([one]) == "in force at step 1 of 250 (1 check; later ones put off: checks cost more than 1 %)"
    one.checks.append(128)
    assert summary([one]) == "in force at steps 1-128 of 250 (2 checks)"
    one.unobserved["fp32 modules"] = None
    line = "in force at steps 1-128 of 250 (2 checks), except for what could not be observed: fp32 modules"
    assert summary([one, proven(clock)]) == line.replace(")", "); 1 other optimizer too", 1)


def test_each_step_is_looked_at_where_tests_ask_for_it(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_STEP", True)
    one = proven(clock, cost=100.0)
    assert one.next_check == 2
    one.applied, clock[0] = 5, 101.0
    assert one.propose(Budget()) == 6
    one.leave_out_check()
    assert one.next_check == 6


def test_the_line_about_the_run() -> None:
    def run(**facts: object) -> Progress:
        return Progress("AdamW", proven=True, **facts)  # type: ignore[arg-type]

    every = run(applied=4096, skipped=2, checks=[2**power for power in range(13)])
    assert summary([every]) == "in force at steps 1-4096 (13 checks), 2 steps skipped"
    assert summary([run(applied=1, checks=[1])]) == "in force at step 1 (1 check)"
    longer = run(applied=5, checks=[1, 2], without_result=1, skipped=1)
    assert summary([longer]) == "in force at steps 1-2 of 5 (2 checks, 1 without a result), 1 step skipped"
    rare = Progress("SGD", applied=1, unrecorded=True)
    assert summary([every, rare]) is None, "it is not proven"
    assert summary([every, longer]) == ("in force at steps 1-4096 (13 checks); 1 other optimizer too, 3 steps skipped")
    assert summary([]) is None and summary([every, run(applied=3, checks=[1], failed=True)]) is None
