"""The agreement of ranks, each a thread with torch's own store: what they agree on, and how much they ask the store."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real store is used")

import torch.distributed as dist

import mpguard
from mpguard.runtime.inspection import Inspection
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import consensus
from mpguard.runtime.proof.consensus import Agreement, Report
from mpguard.runtime.proof.reductions import Fingerprint
from mpguard.runtime.proof.verdict import (
    NOT_IN_FORCE,
    NOT_PROVEN,
    Failure,
    FailureKind,
    Refusal,
    read_failure,
    verdict_of,
)

SIZE, SAME = 24, Fingerprint({"weight": (1.0, 0.5)})

WRONG = Failure(FailureKind.WRONG, "compute: fp32; asked: bf16", "compute", advice="Run it inside autocast")
UNPROVEN = Failure(FailureKind.UNPROVEN, "compute could not be observed; asked: bf16", "compute")


def on(*ranks: int, failure: Failure = WRONG) -> Failure:
    return dataclasses.replace(failure, ranks=ranks)


class Counting:
    """A store that counts the requests of a rank."""

    def __init__(self, real: Any) -> None:
        self.real, self.requests = real, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self.real, name)


def agreed(
    monkeypatch: pytest.MonkeyPatch, reports: dict[int, Report], wait: float
) -> dict[int, tuple[Agreement, Counter[str]]]:
    """Return for each rank that has a report what it agreed on, and its requests."""
    here, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(consensus, "rank", lambda: here.rank)
    monkeypatch.setattr(consensus, "world_size", lambda: (SIZE, SIZE))
    monkeypatch.setattr(consensus, "default_store", lambda: here.store)

    def run(rank: int) -> tuple[Agreement, Counter[str]]:
        here.rank, here.store = rank, Counting(store)
        found = consensus.agree("a point", reports[rank], wait)
        return found, here.store.requests

    with ThreadPoolExecutor(SIZE) as pool:
        return dict(zip(reports, pool.map(run, reports), strict=True))


def test_all_ranks_agree_and_none_reads_the_others_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {rank: Report([WRONG] if rank == 5 else [], SAME, 8 + rank) for rank in range(SIZE)}
    found = agreed(monkeypatch, reports, 20.0)
    assert {str(agreement) for agreement, _ in found.values()} == {str(Agreement([on(5)], [], 8))}
    assert found[0][1]["multi_get"] == 1 and not found[0][1]["get"] and not found[0][1]["check"]
    for _, requests in list(found.values())[1:]:
        assert (requests["set"], requests["get"], requests["add"], requests["multi_get"]) == (1, 1, 2, 0)


def test_a_rank_without_a_report_is_missing_at_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {rank: Report([]) for rank in range(SIZE) if rank not in (3, 17)}
    found = agreed(monkeypatch, reports, 0.3)
    assert all(agreement == Agreement([], [3, 17]) for agreement, _ in found.values()), found


def test_a_proof_asks_the_store_a_few_times_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    here, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(consensus, "rank", lambda: here.rank)
    monkeypatch.setattr(consensus, "world_size", lambda: (SIZE, SIZE))
    monkeypatch.setattr(consensus, "default_store", lambda: here.store)

    def run(rank: int) -> tuple[list[Failure] | None, Counter[str]]:
        here.rank, here.store = rank, Counting(store)
        if rank == 3:
            consensus.publish_end([UNPROVEN])
            return None, here.store.requests
        found = consensus.Round("a proof", Report([WRONG] if rank == 5 else [], SAME, moment=7)).result(20.0)
        return found, here.store.requests

    with ThreadPoolExecutor(SIZE) as pool:
        found = list(pool.map(run, range(SIZE)))
    assert all(failures == [on(3, failure=UNPROVEN), on(5)] for failures, _ in found if failures)
    assert found[0][1]["multi_get"] == 1
    assert all(requests["set"] == 1 and requests["get"] <= 1 for _, requests in found[1:])


def test_without_rank_0_a_look_is_this_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = agreed(monkeypatch, {4: Report([WRONG], None, 16)}, 0.1).values()
    assert found[0] == Agreement([WRONG], [0], 16)


def test_a_loss_of_another_rank_that_is_not_finite_is_known_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {rank: Report([], next_check=32, not_finite=rank in (0, 7)) for rank in range(SIZE)}
    found = agreed(monkeypatch, reports, 20.0)
    assert [rank for rank, (agreement, _) in found.items() if agreement.not_finite] == [0]
    assert found[0][0].not_finite == [7]


def test_a_rank_that_could_not_tell_what_ran_gets_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {rank: Report([], next_check=17 if rank == 9 else 32, again=rank == 9) for rank in range(SIZE)}
    assert {agreement.next_check for agreement, _ in agreed(monkeypatch, reports, 20.0).values()} == {17}


# -- what the ranks conclude ---------------------------------------------------------------------


def test_a_rank_that_is_wrong_decides_over_one_that_is_not_proven() -> None:
    everywhere = consensus.combine([Report([UNPROVEN]), Report([WRONG])])
    refusal = Refusal(tuple(everywhere))
    assert (everywhere, refusal.verdict) == ([on(0, failure=UNPROVEN), on(1)], NOT_IN_FORCE)
    assert str(refusal).startswith("rank 1: compute: fp32; asked: bf16\n  rank 0: not proven: compute could"), refusal


def test_ten_of_twelve_ranks_that_are_not_proven_are_not_wrong() -> None:
    everywhere = consensus.combine([Report([UNPROVEN] if rank < 10 else []) for rank in range(12)])
    assert everywhere == [on(*range(10), failure=UNPROVEN)] and verdict_of(everywhere) == NOT_PROVEN
    text = "not proven: rank 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: compute could not be observed; asked: bf16"
    assert str(Refusal(tuple(everywhere))) == text


def test_gradients_of_other_moments_are_not_compared() -> None:
    one, other = Fingerprint({"weight": (1.0, 0.5)}), Fingerprint({"weight": (2.0, 0.5)})
    assert consensus.combine([Report([], one, moment=8), Report([], other, moment=11)]) == []
    (found,) = consensus.combine([Report([], one, moment=8), Report([], other, moment=8)])
    assert "the gradients differ between ranks" in found.text


def test_ranks_that_have_reported_and_have_no_result_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    inspection = Inspection(Plan(mpguard.recipe("bf16_mixed")), None)
    inspection.publish("alone")
    monkeypatch.setattr(consensus.Round, "missing", lambda _: [])
    assert inspection.missing() == "the other ranks"
    monkeypatch.setattr(consensus.Round, "missing", lambda _: [1, 3])
    assert inspection.missing() == "ranks 1, 3"


def test_what_all_ranks_have_names_none() -> None:
    assert consensus.combine([Report([WRONG]), None, Report([WRONG])]) == [WRONG]
    assert consensus.combine([Report([on(1)]), Report([])]) == [on(1)], "it was agreed on before"


@pytest.mark.parametrize("failure", [WRONG, UNPROVEN, on(1, 3), Failure(FailureKind.WRONG, "not proven: a name")])
def test_failures_are_exchanged_as_data(failure: Failure) -> None:
    assert read_failure(json.loads(json.dumps(failure.data()))) == failure


@pytest.mark.parametrize("published", ["compute: fp32; asked: bf16", {"kind": "wrong"}, 3, None, {"text": 1}])
def test_what_another_version_publishes_ends_no_run_as_wrong(published: object) -> None:
    assert read_failure(published).kind is FailureKind.UNPROVEN


def test_a_report_with_fields_that_are_not_known_is_read() -> None:
    data = Report([WRONG], SAME, 8, 3).data()
    data["fingerprint"]["later"], data["later"] = 1, 2
    assert consensus._read_report(json.dumps(data).encode()) == Report(
        [WRONG], Fingerprint({"weight": [1.0, 0.5]}), 8, 3
    )  # type: ignore[dict-item, list-item]
