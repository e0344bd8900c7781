"""Trains small models, each with one fault whose advice depends on what computed it, and prints what the watch reports.

One line per case: {"kind": ..., "found": [events with a text]}.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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


class Attention(nn.Module):
    """Attention over the batch: its matmuls and its softmax are code between the calls of its layers."""

    gain = 1.0
    masked = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q * self.gain) @ k.t()
        if self.masked:
            mask = torch.ones_like(scores, dtype=torch.bool)
            mask[0] = False
            scores = scores.masked_fill(~mask, float("-inf"))
        return self.out(scores.softmax(-1) @ v)  # type: ignore[no-any-return]


def attention(*, gain: float = 1.0, masked: bool = False) -> Attention:
    found = Attention()
    found.gain, found.masked = gain, masked
    return found


def not_initialized(value: float = 3e38) -> nn.Linear:
    """A layer that has what was in memory, as `to_empty` leaves it."""
    found = nn.Linear(32, 32)
    with torch.no_grad():
        found.weight[0] = value
    return found


def batch_norm_with_nan() -> nn.BatchNorm1d:
    found = nn.BatchNorm1d(32).eval()
    found.running_var.fill_(float("nan"))  # type: ignore[union-attr]
    return found


def dead() -> nn.Module:
    """Return a ReLU that no value reaches: what is before it gets gradients of zero."""
    found = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    with torch.no_grad():
        found[0].bias.fill_(-1e3)
    return found


def mse(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out.float(), x.sum(1, keepdim=True))


def squares_in_fp16(out: torch.Tensor, _x: torch.Tensor) -> torch.Tensor:
    return ((out * 1e3) ** 2).sum()


def norm_of_zero(out: torch.Tensor, _x: torch.Tensor) -> torch.Tensor:
    return (out.float() - out.float().detach()).norm(dim=1).mul(2).sum() + (out.float() * 0).sum().sqrt()


def nan_in_targets(out: torch.Tensor, _x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out.float(), torch.full_like(out, float("nan"), dtype=torch.float32))


def train(
    kind: str, middle: nn.Module, *, autocast: torch.dtype | None = None, factor: float = 1.0, loss_factor: float = 1.0,
    rate: float = 1e-3, weights: torch.dtype = torch.float32, scale: float | None = None, steps: int = 12,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mse, sgd: bool = False,
) -> None:  # fmt: skip
    """Train, and print the events. factor: of the batch at step 7."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), middle, nn.Linear(32, 1)).to(weights)
    optimizer = torch.optim.SGD(model.parameters(), rate) if sgd else torch.optim.AdamW(model.parameters(), rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None, growth_interval=10**6)
    file = Path("watch.jsonl")
    mpguard.watch(model, jsonl=str(file))
    for step in range(1, steps + 1):
        x = torch.randn(32, 16) * (factor if step == 7 else 1.0)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            out = model(x.to(weights))
        loss = loss_of(out, x) * loss_factor
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
train("overflow of attention in FP16", attention(gain=3e5), autocast=torch.float16)
train("rows that are all masked", attention(masked=True), autocast=torch.bfloat16)
train("NaN in a buffer", batch_norm_with_nan(), autocast=torch.bfloat16)
train("a loss in FP16", same, autocast=torch.float16, loss_of=squares_in_fp16)
train("the gradient of a norm of zeros", same, loss_of=norm_of_zero)
train("NaN in the targets", same, autocast=torch.bfloat16, loss_of=nan_in_targets)
train("gradients whose squares overflow", same, loss_factor=1e20, sgd=True, rate=0.0)
train("a loss that explodes", same, rate=10.0, steps=30)
train("weights that were not initialized", not_initialized(), steps=3)
train("a weight that is NaN from the start", not_initialized(float("nan")), steps=3)
train("a batch of 1e30", same, factor=1e30, autocast=torch.bfloat16)
train("a loss scale that begins too high", same, autocast=torch.float16, scale=2.0**30, loss_factor=1e3)
train("modules whose gradients are zero", dead(), steps=25)
