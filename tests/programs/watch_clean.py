"""Five runs without a fault, and what else is told about the watch: one process, results as lines of JSON."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mpguard
from mpguard.watching import session


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))


def batch() -> torch.Tensor:
    return torch.randn(32, 16)


def loop(model: Any, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, steps: int) -> list[float]:
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
    return losses


def gan() -> list[float]:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (generator, critic)]
    losses = []
    for _ in range(200):
        for number, optimizer in enumerate(optimizers):
            fake = critic(generator(torch.randn(8, 4)))
            loss = nn.functional.softplus(-fake).mean() if number == 0 else nn.functional.softplus(fake).mean()
            loss = loss + (nn.functional.softplus(-critic(torch.randn(8, 16))).mean() if number else 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def plain(dtype: torch.dtype | None, steps: int = 300, **options: Any) -> Callable[[], list[float]]:
    def run() -> list[float]:
        model = net()
        return loop(model, torch.optim.AdamW(model.parameters(), lr=3e-3, **options), dtype, steps)

    return run


def compiled() -> list[float]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return loop(torch.compile(model, backend="aot_eager"), optimizer, torch.bfloat16, 200)


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

# A model that is watched can be pickled and copied; its copies are not watched.
model = net()
mpguard.watch(model)
buffer = io.BytesIO()
torch.save(model, buffer)
twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
assert b"mpguard.watching.replay" not in buffer.getvalue()
for each in (twin, loaded):
    each(batch())
watched = session.Watch.__name__ and mpguard.watching.current.current()  # type: ignore[attr-defined]
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
