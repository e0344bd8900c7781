"""Trains small models, each with one fault whose advice depends on what computed it, and prints what the watch reports.

One line per case: {"kind": ..., "found": [events with a text]}.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import mpguard
from mpguard.watching.api import finish


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0).abs().log()


class Ratio(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x) / (x - x)


def train(
    kind: str, middle: nn.Module, *, autocast: torch.dtype | None = None, factor: float = 1.0, loss_factor: float = 1.0,
    rate: float = 1e-3, weights: torch.dtype = torch.float32, scale: float | None = None, steps: int = 12,
) -> None:  # fmt: skip
    """Train, and print the events. factor: of the batch at step 7."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), middle, nn.Linear(32, 1)).to(weights)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None, growth_interval=10**6)
    file = Path("watch.jsonl")
    mpguard.watch(model, jsonl=str(file))
    for step in range(1, steps + 1):
        x = torch.randn(32, 16) * (factor if step == 7 else 1.0)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            out = model(x.to(weights))
        loss = F.mse_loss(out.float(), x.sum(1, keepdim=True)) * loss_factor
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    finish()
    events = [json.loads(line) for line in file.read_text().splitlines()]
    found = [each for each in events if each["event"] not in ("run", "step", "underflow_shares", "skipped_step")]
    print(json.dumps({"kind": kind, "found": found}), flush=True)


same = nn.Identity()
train("overflow of FP16 autocast", same, autocast=torch.float16, factor=1e6)
train("the same batch in BF16", same, autocast=torch.bfloat16, factor=1e6)
train("log of 0 in FP32", Log())
train("log of 0 in FP16 autocast", Log(), autocast=torch.float16)
train("0/0 in BF16 autocast", Ratio(), autocast=torch.bfloat16)
train("all gradients are zero", same, autocast=torch.float16, loss_factor=1e-10, scale=2.0)
train("all gradients are zero in FP32", same, loss_factor=0.0)
train("subnormal without a scaler", same, autocast=torch.float16, loss_factor=1e-5)
train("weights that do not move", same, weights=torch.bfloat16, rate=1e-6)
train("weights that move in BF16", same, weights=torch.bfloat16, rate=1e-2)
train("a learning rate of 0", same, weights=torch.bfloat16, rate=0.0)
train("clean", same, autocast=torch.bfloat16)
