"""Which rank is named by those whose collective has failed. Ranks are threads with torch's own store here."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch", reason="the real store is used")

import torch.distributed as dist

from mpguard.runtime import lost_ranks
from mpguard.runtime.last_lines import printed_at_the_end
from mpguard.runtime.messages import not_in_force
from mpguard.runtime.proof.verdict import Failure, FailureKind, Refusal

CLOSED = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")


def described(monkeypatch: pytest.MonkeyPatch, errors: dict[int, BaseException], size: int) -> dict[int, str | None]:
    """Return the line of each rank that ends with an error."""
    here, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(lost_ranks, "rank", lambda: here.rank)
    monkeypatch.setattr(lost_ranks, "place", lambda: f"node {here.rank}")
    monkeypatch.setattr(lost_ranks, "place_of", lambda _store, rank: f"node {rank}")
    monkeypatch.setattr(lost_ranks, "had_group", lambda: True)
    monkeypatch.setattr(lost_ranks, "default_store", lambda: store)
    monkeypatch.setattr(lost_ranks, "world_of", lambda: size)
    monkeypatch.setattr(lost_ranks, "CAUSE_WAIT", 0.5)
    monkeypatch.setattr(lost_ranks, "_last_line", None)  # restored at the end

    def run(rank: int) -> str | None:
        here.rank = rank
        return lost_ranks.describe(errors[rank])

    with ThreadPoolExecutor(len(errors)) as pool:
        return dict(zip(errors, pool.map(run, errors), strict=True))


def test_the_error_of_the_first_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = described(monkeypatch, {1: ValueError("no\ndata"), 0: CLOSED, 2: CLOSED}, 3)
    assert found[1] is None, "its own traceback says it"
    for rank in (0, 2):
        line = f"mpguard: rank {rank} (node {rank}) ended because of another one: rank 1 (node 1) ended with "
        assert found[rank] == f"{line}ValueError: no data"


def test_a_rank_that_was_refused_alone_is_no_crash_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_ranks, "_refused", ())
    wrong = Failure(FailureKind.WRONG, "compute: fp32; asked: bf16", "compute", (), "Enable autocast", ("{fp32: x}",))
    unproven = Failure(FailureKind.UNPROVEN, "reduction could not be observed", "reduction")
    error = not_in_force(Refusal((wrong, unproven), before="step 8: "))
    found = described(monkeypatch, {1: error, 0: CLOSED}, 2)
    line = "not in force: step 8: compute: fp32; asked: bf16; not proven: step 8: reduction could not be observed"
    assert str(found[0]).endswith(f"rank 1 (node 1) was refused: {line}")
    first, second = lost_ranks.refusal()
    assert first == dataclasses.replace(wrong, text=f"step 8: {wrong.text}", ranks=(1,)), "row, advice and allowance"
    assert (second.kind, second.row, second.ranks) == (FailureKind.UNPROVEN, "reduction", (1,))
    assert described(monkeypatch, {1: ValueError("no"), 0: CLOSED}, 2)[0] and lost_ranks.refusal() == ()


def test_a_survivor_leaves_its_line_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(lost_ranks, "_last_line", "mpguard: rank 0 ended because of another one: rank 1 was killed")
    with printed_at_the_end():
        lost_ranks.print_last_line()
        assert capsys.readouterr().err == "", "torchrun's lines come below it"
    assert capsys.readouterr().err == f"{lost_ranks._last_line}\n"


def test_a_rank_without_an_error_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = described(monkeypatch, {0: CLOSED, 2: CLOSED}, 3)
    assert all(str(line).endswith("rank 1 (node 1) was killed, or does not answer any more") for line in found.values())
    found = described(monkeypatch, {0: CLOSED}, 3)
    assert "one of ranks 1, 2 (node 1; node 2) was killed" in str(found[0])


@pytest.mark.parametrize(
    "error",
    [
        OSError("Connection reset by peer"),
        RuntimeError("the download timed out"),
        RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 64 vs 32"),
    ],
)
def test_an_error_of_its_own_is_no_other_ranks(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    assert described(monkeypatch, {0: error}, 2) == {0: None}


def test_ranks_that_have_all_failed_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(described(monkeypatch, {0: CLOSED, 1: CLOSED}, 2).values()) == {None}
