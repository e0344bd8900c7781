"""The exchange of plans: ranks are threads with torch's own store here, and processes in the last tests."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real store is used")

import torch.distributed as dist
from processes import ranks_in_fork, run_python, transcript

import mpguard
from mpguard.core.errors import ConfigError
from mpguard.policy.allow import allowances
from mpguard.runtime import plan_exchange
from mpguard.runtime.plan import Plan
from mpguard.runtime.plan_exchange import Exchange, PublishedPlan, RankPlan, difference
from mpguard.runtime.proof.verdict import Failure, Verdict

SIZE = 24
BF16, FP32 = (Plan(mpguard.recipe(name)) for name in ("bf16_mixed", "fp32"))


class Counting:
    """A store that counts the requests of a rank."""

    def __init__(self, real: Any) -> None:
        self.real, self.requests = real, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self.real, name)


@dataclasses.dataclass
class Ended:
    """What a rank has found; the requests that it has sent."""

    found: Failure | None
    exchange: Exchange
    requests: Counter[str]


def exchanged(monkeypatch: pytest.MonkeyPatch, plans: dict[int, RankPlan | list[RankPlan]]) -> dict[int, Ended]:
    """Return what each rank with a plan finds. With several, it has changed its plan before it compares."""
    here, real = threading.local(), dist.HashStore()
    monkeypatch.setattr(plan_exchange, "rank", lambda: here.rank)
    monkeypatch.setattr(plan_exchange, "world_size", lambda: (SIZE, SIZE))
    monkeypatch.setattr(plan_exchange, "ANSWER_WAIT", 5.0 if len(plans) == SIZE else 0.3)
    published = threading.Barrier(len(plans))

    def run(rank: int) -> Ended:
        here.rank = rank
        store = Counting(real)
        exchange = Exchange(store)
        own = plans[rank]
        for each in own if isinstance(own, list) else [own]:
            exchange.publish(each)
        if any(isinstance(each, list) for each in plans.values()):
            published.wait()
        exchange.wait()
        return Ended(exchange.found(()), exchange, store.requests)

    with ThreadPoolExecutor(SIZE) as pool:
        return dict(zip(plans, pool.map(run, plans), strict=True))


def test_the_same_plan_costs_a_few_requests_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = exchanged(monkeypatch, {rank: RankPlan.of(BF16) for rank in range(SIZE)})
    assert {each.found for each in ended.values()} == {None}
    for each in ended.values():
        assert each.requests["set"] == 2 and not each.requests["get"] and not each.requests["multi_get"]


def test_a_difference_that_is_allowed_is_a_row_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(BF16, allow=allowances([{"ranks_differ": "policy"}]))
    plans = {rank: RankPlan.of(FP32 if rank == 5 else plan) for rank in range(SIZE)}
    exchange = exchanged(monkeypatch, plans)[0].exchange
    monkeypatch.setattr(plan_exchange, "_exchange", exchange)
    exchange.found(("policy", "allow"))
    (row,) = plan_exchange.rows(plan)
    assert (row.name, row.allowed, row.verdict) == ("plans", "ranks_differ: policy", Verdict.ALLOWED)
    assert row.found.startswith("ranks 0, 1, 2") and "; rank 5 (" in row.found and "recipe fp32" in row.found
    exchange.allowed = ""
    assert [each.found for each in plan_exchange.rows(plan)] == ["not needed: ranks_differ: policy"]
    assert plan_exchange.rows(BF16) == ()


def test_another_policy_is_found_by_every_rank_with_field_value_rank_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setattr(plan_exchange.socket, "gethostname", lambda: "gpu-b07")
    plans = {rank: RankPlan.of(FP32 if rank == 5 else BF16) for rank in range(SIZE)}
    found = {each.found for each in exchanged(monkeypatch, plans).values()}
    message = str(found.pop())
    assert not found, "the same on each rank"
    assert "rank 5 (node 3, gpu-b07): recipe fp32, bf16 False, params_dtype fp32" in message
    assert "15 more (node 3, gpu-b07): recipe bf16_mixed, bf16 True, params_dtype bf16" in message
    assert "mpguard_allow: [{ranks_differ: policy}]" in message


def test_a_rank_without_mpguard_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = {rank: RankPlan.of(BF16) for rank in range(SIZE) if rank not in (3, 17)}
    ended = exchanged(monkeypatch, plans)
    assert {each.found for each in ended.values()} == {None}
    assert capsys.readouterr().err.count("ranks 3, 17 did not publish a plan within 0.3 s") == 1


def test_without_rank_0_one_rank_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ended = exchanged(monkeypatch, {rank: RankPlan.of(BF16) for rank in range(1, SIZE)})
    assert {each.found for each in ended.values()} == {None}
    assert capsys.readouterr().err.count("mpguard: rank 0 did not publish a plan within") == 1


def test_a_wrong_rank_is_found_although_another_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {rank: RankPlan.of(FP32 if rank == 5 else BF16) for rank in range(SIZE) if rank != 17}
    ended = exchanged(monkeypatch, plans)
    assert all("recipe fp32" in str(ended[rank].found) for rank in (0, 5))


def test_a_plan_that_is_changed_in_the_script_is_compared_when_all_ranks_have_changed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = [RankPlan.of(BF16), RankPlan.of(FP32)]
    ended = exchanged(monkeypatch, dict.fromkeys(range(SIZE), changed))
    assert {each.found for each in ended.values()} == {None}
    ended = exchanged(monkeypatch, {rank: changed if rank == 5 else changed[0] for rank in range(SIZE)})
    assert {each.found for each in ended.values()} == {None}
    assert "rank 5" in str(ended[0].exchange.found((), settled=True))


def answers(*plans: RankPlan) -> dict[int, PublishedPlan]:
    return {rank: PublishedPlan(plan, f"node {rank}, host", 0) for rank, plan in enumerate(plans)}


def test_what_counts_as_another_plan() -> None:
    own = RankPlan.of(BF16)
    renamed = RankPlan.of(Plan(mpguard.recipe("bf16_mixed").replace(name="ours")))
    assert difference(answers(own, renamed)) is None and own.digest() == renamed.digest()
    assert difference(answers(own, dataclasses.replace(own, strategy="ddp"))) is None, "the first states no strategy"
    other = RankPlan.of(Plan(BF16.policy, allow=allowances(["local_sgd", "fp32: head"])))
    assert "rank 1 (node 1, host): allow fp32: head, local_sgd" in str(difference(answers(own, other)))
    ddp, fsdp = (dataclasses.replace(own, strategy=name) for name in ("ddp", "fsdp2"))
    assert "strategy fsdp2" in str(difference(answers(ddp, fsdp, own)))


def test_an_intended_difference_is_allowed_by_name() -> None:
    pair = answers(RankPlan.of(BF16), RankPlan.of(Plan(mpguard.recipe("bf16_mixed").replace(tf32=True))))
    assert "tf32 None" in str(difference(pair)) and difference(pair, ["strategy"]) is not None
    assert difference(pair, ["policy"]) is None and difference(pair, ["tf32"]) is None
    for value in ("policy", "strategy", "allow", "fp8_recipe"):
        assert [str(each) for each in allowances({"ranks_differ": value})] == [f"ranks_differ: {value}"]
    for value in ("mpguard", "polcy", ""):
        with pytest.raises(ConfigError, match="ranks_differ"):
            allowances({"ranks_differ": value})


def test_another_mpguard_is_refused_whatever_is_allowed_and_whatever_it_publishes() -> None:
    own = RankPlan.of(BF16)
    unknown = RankPlan.read('{"mpguard": "9.0", "recipe": "bf16_mixed", "new": 1}')
    found = str(difference(answers(own, unknown), ["policy", "allow"]))
    assert "different versions of mpguard: rank 0 (node 0, host): mpguard 0." in found and "mpguard 9.0" in found


#: Rank 1 differs from rank 0 as the first argument says. A rank prints when it has trained.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
import mpguard
from mpguard.runtime import plan_exchange
from mpguard.runtime.proof import consensus

plan_exchange.ANSWER_WAIT = consensus.AGREEMENT_WAIT = consensus.FINAL_WAIT = 2.0
differs, rank = sys.argv[1], int(os.environ["RANK"])
if rank == 1:
    if differs == "policy":
        os.environ["MPGUARD_POLICY"] = str(mpguard.recipe("fp32"))
    elif differs == "version":
        plan_exchange.__version__ = "9.9.9"
    elif differs == "library":
        sys.path.insert(0, os.path.abspath("other"))
if (rank, differs) != (1, "inactive") and differs != "late":
    import mpguard.auto
dist.init_process_group("gloo")
if differs == "late" or (rank, differs) == (1, "changed"):
    mpguard.activate("fp32" if rank else "bf16_mixed")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0 or differs not in ("policy", "late", "changed")):
        loss = model(torch.randn(4, 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("trained", flush=True)
dist.destroy_process_group()
"""

WRONG = "rank 0 ({}): recipe bf16_mixed, bf16 True, params_dtype bf16, tf32 None; rank 1 ({}): recipe fp32"


@pytest.mark.parametrize(
    ("differs", "trained", "message"),
    [
        ("policy", False, WRONG),
        ("late", False, WRONG),
        ("changed", False, WRONG),
        ("version", False, "different versions of mpguard: rank 0"),
        ("inactive", True, "not proven: no result from rank 1"),
        ("library", True, ""),
    ],
)
def test_two_ranks_that_differ(tmp_path: Path, differs: str, trained: bool, message: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "other" / "accelerate-0.1.dist-info").mkdir(parents=True)
    (tmp_path / "other" / "accelerate-0.1.dist-info" / "METADATA").write_text("Name: accelerate\nVersion: 0.1\n")
    policy = str(mpguard.recipe("bf16_mixed"))
    ended = ranks_in_fork(["train.py", differs], cwd=tmp_path, program=run_python, MPGUARD_POLICY=policy)
    shown = "\n".join(map(transcript, ended))
    assert all(("trained" in each.stdout) == trained for each in ended), shown
    errors = "".join(each.stderr for each in ended)
    host = socket.gethostname()
    assert message.format(host, host) in errors, shown
    if differs == "library":
        assert [each.returncode for each in ended] == [0, 0], shown
        assert "accelerate 0.1. Install the same ones" in ended[0].stderr and "step 1 proven in force" in errors, shown
    elif differs == "inactive":
        assert [each.returncode for each in ended] == [1, 0], shown
        assert "rank 1 did not publish a plan within 2 s: mpguard is not active there" in ended[0].stderr, shown
        assert "(a parameter server), declare these: mpguard_allow: [{idle_ranks: 1-3}]" in ended[0].stderr, shown
    else:
        assert [each.returncode for each in ended] == [1, 1], shown
        assert errors.count("not in force: ") == 1, shown


def test_different_plans_under_warn_stay_not_in_force(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    plan = Plan(mpguard.recipe("bf16_mixed"), enforce="warn", proof_json=str(tmp_path / "proof.json"))
    ended = ranks_in_fork(["train.py", "policy"], cwd=tmp_path, program=run_python, **plan.environment())
    shown = "\n".join(map(transcript, ended))
    assert [each.returncode for each in ended] == [0, 0], shown
    first = ended[0].stderr
    assert "not in force (continuing: enforce is warn): the ranks have different plans" in first, shown
    assert "step 1 of AdamW: precision as asked too on all 2 ranks, in a run that is not in force" in first, shown
    assert "proven" not in first and "\nin force at" not in first, shown
    written = json.loads((tmp_path / "proof.json").read_text())
    assert written["verdict"] == "not in force" and "different plans" in written["failures"][0], shown
