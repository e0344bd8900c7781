"""On a GPU the watch never waits for it in light, and full names the module before the step is applied.

pytest tests/gpu/test_watch_gpu.py
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpguard
from mpguard.policy.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::mpguard.MpguardWarning")]

DELAYED = Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=16, backend="te")


class Zero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x - x) if self.on else x


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), Zero()) for _ in range(4))).cuda()


def train(model: Any, steps: int, fault: int | None = None) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(1)
    for step in range(1, steps + 1):
        model[2][1].on = step == fault
        x = torch.randn(64, 256, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        loss = (y.float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_light_never_waits_for_the_gpu(tmp_path: Path) -> None:
    train(net(), 3)
    model = net()  # moving it waits
    torch.cuda.synchronize()
    mpguard.watch(jsonl=str(tmp_path / "light.jsonl"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, 250)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mpguard.watch(level="off")
    found = lines(tmp_path / "light.jsonl")
    steps = [line for line in found if line["event"] == "step"]
    assert len(steps) == 250 and all(isinstance(line["loss"], float) for line in steps)
    assert sum(line["grad_norm"] is not None for line in steps) >= 25
    assert any(line["event"] == "underflow_shares" for line in found)


def test_losses_are_bit_equal() -> None:
    without = torch.stack(train(net(), 50))
    for level in ("light", "full"):
        mpguard.watch(level=level)
        watched = torch.stack(train(net(), 50))
        mpguard.watch(level="off")
        assert torch.equal(watched, without), level


@pytest.mark.parametrize("level", ["light", "full"])
def test_a_fault_is_found(tmp_path: Path, level: str) -> None:
    mpguard.watch(level=level, jsonl=str(tmp_path / "fault.jsonl"))
    train(net(), 6, fault=4)
    torch.cuda.synchronize()
    mpguard.watch(level="off")
    (event,) = [line for line in lines(tmp_path / "fault.jsonl") if line["event"] == "nonfinite"]
    assert event["step"] in (4, 5)
    if level == "full":
        assert event["module"] == "2.1" and event["value"]["phase"] == "forward" and event["step"] == 4


def scaled(steps: int, spike: int | None = None) -> int:
    """Train with delayed scaling, at one step with inputs that are 100 times larger; return how often it waited."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda()
    mpguard.convert(model, DELAYED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for step in range(1, steps + 1):
                x = torch.randn(64, 256, device="cuda") * (100.0 if step == spike else 1.0)
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return sum("synchroniz" in str(each.message) for each in caught)


def test_saturation_of_delayed_scaling(tmp_path: Path) -> None:
    """It is read without waiting, names the layer, and a run without a spike has no event."""
    pytest.importorskip("transformer_engine.pytorch")
    without = scaled(60)
    waited = {}
    for kind, spike in (("clean", None), ("spike", 50)):
        mpguard.watch(jsonl=str(tmp_path / f"{kind}.jsonl"))
        waited[kind] = scaled(60, spike)
        mpguard.watch(level="off")
    assert waited["clean"] <= without
    clean, spiked = (
        [line for line in lines(tmp_path / f"{kind}.jsonl") if line["event"].startswith("fp8_")]
        for kind in ("clean", "spike")
    )
    assert clean == []
    assert [(line["event"], line["step"], line["module"]) for line in spiked] == [("fp8_saturation", 50, "0")]
    assert 50 < spiked[0]["value"]["times"]["0: input"] < 200
