"""Five runs without a fault, and what else is told about the watch: one process, results as lines of JSON."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

import mpguard
from mpguard.watching import session
from mpguard.watching.current import current


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))


def batch() -> torch.Tensor:
    return torch.randn(32, 16)


def loop(model: Any, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, steps: int) -> list[float]:
    """Train, and return the losses and the weights."""
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for _ in range(steps):
        x = batch()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = model(x)
        loss = (y.float() - x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *nn.utils.parameters_to_vector(model.parameters()).tolist()]


def gan() -> list[float]:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (generator, critic)]
    losses = []
    for _ in range(100):
        for number, optimizer in enumerate(optimizers):
            fake = critic(generator(torch.randn(8, 4)))
            loss = nn.functional.softplus(-fake).mean() if number == 0 else nn.functional.softplus(fake).mean()
            loss = loss + (nn.functional.softplus(-critic(torch.randn(8, 16))).mean() if number else 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def plain(dtype: torch.dtype | None, steps: int = 150, **options: Any) -> Callable[[], list[float]]:
    def run() -> list[float]:
        model = net()
        return loop(model, torch.optim.AdamW(model.parameters(), lr=3e-3, **options), dtype, steps)

    return run


def compiled() -> list[float]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return loop(torch.compile(model, backend="aot_eager"), optimizer, torch.bfloat16, 100)


RUNS: dict[str, Callable[[], list[float]]] = {
    "fp32": plain(None),
    "bf16": plain(torch.bfloat16),
    "fp16": plain(torch.float16, fused=True),
    "gan": gan,
    "compiled": compiled,
}

for name, run in RUNS.items():
    without = run()
    torch.compiler.reset()
    facts: dict[str, Any] = {"kind": name}
    for level in ("light", "full"):
        path = Path(f"{name}-{level}.jsonl")
        mpguard.watch(level=level, jsonl=str(path))
        facts[level] = run() == without
        mpguard.watch(level="off")
        torch.compiler.reset()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        facts[f"{level} events"] = sorted({line["event"] for line in lines})
        facts[f"{level} steps"] = sum(line["event"] == "step" for line in lines)
    print(json.dumps({"rank": 0, **facts}), flush=True)


class Scaled(nn.Linear):
    """A layer with the state of Transformer Engine's delayed scaling, which needs a GPU, and its updates of it."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        formats = SimpleNamespace(value=SimpleNamespace(max_fwd=448.0, max_bwd=57344.0))
        recipe = SimpleNamespace(margin=0, fp8_format=formats)
        state = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(8, 3), recipe=recipe)
        self.fp8_meta = {"scaling_fwd": state}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.fp8_meta["scaling_fwd"]
        for column, tensor in enumerate((x, self.weight)):
            state.amax_history[0, column] = tensor.detach().abs().max()
        largest = state.amax_history.max(0).values
        state.scale.copy_(torch.where(largest > 0, 448.0 / largest, state.scale))
        state.amax_history.copy_(state.amax_history.roll(-1, 0))
        state.amax_history[0] = 0
        return super().forward(x)


def scaled(grown: Callable[[int], float]) -> list[dict[str, Any]]:
    """Train with inputs that are so many times larger at each step, and return the events."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), Scaled(), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mpguard.watch(jsonl="scaled.jsonl")
    for step in range(1, 201):
        with torch.no_grad():
            model[0].weight.fill_(grown(step))
        nn.functional.mse_loss(model(batch()), torch.zeros(32, 16)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    mpguard.watch(level="off")
    lines = [json.loads(line) for line in Path("scaled.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"].startswith("fp8_")]


sys.modules["transformer_engine"] = ModuleType("transformer_engine")
fp8 = {
    "clean": scaled(lambda step: 1.0),
    "spike": scaled(lambda step: 40.0 if step == 120 else 1.0),
    "growth": scaled(lambda step: 1.03**step),
}
print(json.dumps({"rank": 0, "kind": "fp8", **fp8}), flush=True)

# A model that is watched can be pickled and copied; its copies are not watched.
model = net()
mpguard.watch(model)
buffer = io.BytesIO()
torch.save(model, buffer)
twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
assert b"mpguard.watching.replay" not in buffer.getvalue()
for each in (twin, loaded):
    each(batch())
watched = current()
assert watched is not None and watched.captures.batches == []
model(batch())
assert len(watched.captures.batches) == 1

# Its own failure is printed once, and the run continues with the same losses.
expected = plain(None, 20)()
mpguard.watch()
session.gradients.norms = lambda own: 1 / 0  # type: ignore[assignment, return-value]
errors = io.StringIO()
with contextlib.redirect_stderr(errors):
    failed = plain(None, 20)() == expected
print(json.dumps({"rank": 0, "kind": "failure", "same": failed, "printed": errors.getvalue()}), flush=True)
