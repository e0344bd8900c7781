"""Short training programs as text: a common beginning, and how they are run under a policy."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest
from processes import in_fork, mp_yaml

#: The beginning of each script: a small model, autocast, a loop.
HEAD = """
import os, sys
import torch
from torch import nn
torch.manual_seed(0)
F = torch.nn.functional
def net(size=32, layers=2):
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(size, size), nn.ReLU())])
def amp(dtype=torch.bfloat16, enabled=True): return torch.autocast("cpu", dtype=dtype, enabled=enabled)
def adam(m, **more): return torch.optim.AdamW(m.parameters(), **more)
x = torch.randn(16, 32)
def train(m, o, steps=3, **autocast):
    for _ in range(steps):
        with amp(**autocast): loss = m(x).float().pow(2).mean()
        loss.backward(); o.step(); o.zero_grad()
"""


def run(
    folder: Path, script: str, *words: object, recipe: str = "bf16_mixed", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script after `HEAD` under a recipe on the CPU; its proof is in proof.json."""
    (folder / "t.py").write_text(HEAD + script)
    mixed_precision = {"fp16_mixed": "fp16", "fp32": "'no'"}.get(recipe, "bf16")
    config = mp_yaml(folder, recipe=recipe, mixed_precision=mixed_precision)
    return in_fork(["--config", config, "--proof-json", folder / "proof.json", *words, "t.py"], cwd=folder, **more)


@functools.cache
def _has_bf16_lstm() -> bool:
    import torch

    with torch.autocast("cpu", torch.bfloat16):
        try:
            torch.nn.LSTM(32, 64)(torch.zeros(1, 1, 32))
        except RuntimeError:
            return False
    return True


def needs_bf16_lstm() -> pytest.MarkDecorator:
    """Return a mark for programs with an LSTM under autocast: torch has none for a CPU without AVX-512."""
    return pytest.mark.skipif(not _has_bf16_lstm(), reason="torch cannot compute an LSTM in BF16 on this CPU")
