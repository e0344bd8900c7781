"""On a GPU the watch never waits for it in light, and full names the module before the step is applied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpguard


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
    torch.cuda.synchronize()
    mpguard.watch(jsonl=str(tmp_path / "light.jsonl"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(net(), 250)
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
