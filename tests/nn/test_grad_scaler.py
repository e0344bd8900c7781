"""FP16: every loss-scale field of the policy in force, shown by overflows made on purpose.

GradScaler and FSDP run in FP16 on the CPU; DeepSpeed's FP16 engine too, once its question whether the device has FP16
is answered for it, under accelerate too, which makes no GradScaler on a CPU: tests/gpu/test_scale_accelerate.py.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from overflow_story import BAD, EXPECTED, GOOD, OF_DEEPSPEED, POLICY, STORY
from paths import PROGRAMS
from processes import on_ranks, results, transcript
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import mpguard
from mpguard.nn import grad_scaler
from mpguard.policy.policy import Policy
from mpguard.runtime import activation
from mpguard.runtime import guard as guards
from mpguard.runtime.plan import Plan


def follow(step: Callable[[float], tuple[float, bool]]) -> list[tuple[float, bool]]:
    """step: makes one with gradients that are finite, or not; returns the scale and whether weights changed."""
    return [step(factor) for factor, _ in STORY]


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(guards, "_current", None)
    activation.start(Plan(POLICY, enforce="off", announced=True))
    yield
    monkeypatch.setattr(guards, "_current", None)


def stepping(scaler: Any) -> Callable[[float], tuple[float, bool]]:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def step(factor: float) -> tuple[float, bool]:
        before = weight.item()
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), weight.item() != before

    return step


def test_the_scaler_of_a_policy() -> None:
    assert follow(stepping(POLICY.to("torch").scaler("cpu"))) == EXPECTED


@pytest.mark.usefixtures("activated")
def test_a_scaler_that_a_script_makes_with_other_numbers(caplog: pytest.LogCaptureFixture) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    assert isinstance(scaler, torch.amp.GradScaler) and type(scaler).__name__ == "GradScaler"
    assert follow(stepping(scaler)) == EXPECTED
    assert "GradScaler: init_scale: 4.0 -> 256.0" in caplog.text


def test_stock_halves_at_each_overflow_and_without_end() -> None:
    """The control: torch's own, given what it has a place for."""
    found = follow(stepping(torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)))
    assert found != EXPECTED and min(scale for scale, _ in found) < POLICY.min_loss_scale


@pytest.mark.usefixtures("activated")
def test_a_class_derived_from_gradscaler_keeps_its_own_behaviour() -> None:
    class Mine(torch.amp.GradScaler):
        def __init__(self) -> None:
            super().__init__("cpu")
            self.note = "mine"

    scaler = Mine()
    assert isinstance(scaler, Mine) and scaler.note == "mine"
    assert follow(stepping(scaler)) == EXPECTED


@pytest.mark.parametrize("end", range(1, len(STORY), 3))
def test_a_resumed_run_has_borne_the_same_overflows(end: int) -> None:
    first, again = POLICY.to("torch").scaler("cpu"), POLICY.to("torch").scaler("cpu")
    step = stepping(first)
    for factor, _ in STORY[:end]:
        step(factor)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = stepping(again)
    assert [rest(factor) for factor, _ in STORY[end:]] == EXPECTED[end:]


def test_the_state_of_torchs_scaler_and_ours_load_into_each_other() -> None:
    ours, stock = POLICY.to("torch").scaler("cpu"), torch.amp.GradScaler("cpu")
    stepping(ours)(BAD)
    stock.load_state_dict(ours.state_dict())
    assert stock.state_dict()["scale"] == 2.0**8 and grad_scaler.KEY not in stock.state_dict()
    ours.load_state_dict(stock.state_dict())
    assert stepping(ours)(BAD) == (2.0**8, False), "the count starts again at zero"


def test_a_scaler_is_copied_and_pickled() -> None:
    scaler = POLICY.to("torch").scaler("cpu")
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert follow(stepping(other)) == EXPECTED


def test_a_scale_that_is_set_by_hand_is_left_alone() -> None:
    scaler = POLICY.to("torch").scaler("cpu")
    stepping(scaler)(GOOD)
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0


def test_a_disabled_scaler_and_a_fixed_scale_have_none_of_it() -> None:
    assert type(Policy(fp16=True, loss_scale=8.0).to("torch").scaler("cpu")) is torch.amp.GradScaler
    assert type(mpguard.recipe("bf16_mixed").to("torch").scaler("cpu")) is torch.amp.GradScaler


@pytest.mark.filterwarnings("ignore:torch.*has no setting for:mpguard.NotCarried")
def test_fsdp1s_scaler() -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        scaler = POLICY.to("torch", "fsdp1").scaler("cpu")
    finally:
        torch.distributed.destroy_process_group()
    assert isinstance(scaler, ShardedGradScaler) and isinstance(scaler, grad_scaler.ShardedGradScaler)


@pytest.mark.parametrize(
    "engine", ["ddp", "fsdp1", "fsdp1 with an optimizer made before", "fsdp2", "zero1", "zero2", "zero3"]
)
def test_engines_on_two_ranks(tmp_path: Any, engine: str) -> None:
    """One rank alone overflows: no rank steps, and all have the same scale."""
    run = on_ranks(PROGRAMS / "overflow.py", *engine.split(maxsplit=1), cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    found = results(run)
    assert len(found) == 2
    for each in found:
        steps = [tuple(step) for step in each["steps"]]
        if engine.startswith("zero"):
            assert steps == [(2.0**power, factor == GOOD) for factor, power in OF_DEEPSPEED], each
            assert "loss scale already at minimum" in each["error"]
        else:
            assert steps == EXPECTED and each["error"] is None, each


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_with_deepspeed(tmp_path: Any, stage: int) -> None:
    """Its step goes through accelerate's wrapper of DeepSpeed's engine, which knows of what was skipped."""
    run = on_ranks(PROGRAMS / "overflow_accelerated.py", stage, cwd=tmp_path, processes=1)
    assert run.returncode == 0, transcript(run)
    (found,) = results(run)
    assert [tuple(step) for step in found["steps"]] == [(2.0**power, factor == GOOD) for factor, power in OF_DEEPSPEED]
