"""`mpguard tune` on a GPU: BF16 against FP8, timed with events on the stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from limits import seconds
from processes import environment, mp_yaml

from mpguard.document import mp_yaml as keys
from mpguard.policy import hardware

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SCRIPT = """
import os
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
layers = [torch.nn.Linear(4096, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 4096)]
model = torch.nn.Sequential(*layers, *(torch.nn.Linear(4096, 4096) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
model, optimizer = accelerator.prepare(model, optimizer)
inputs = torch.randn(8192, 4096, device=accelerator.device)
for _ in range(1000):
    loss = (model(inputs).float() - inputs).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_the_winner_is_the_fastest_that_is_proven(processes: int, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.device_count() < processes or hardware.detect().lacks("tensorwise"):
        pytest.skip("needs more GPUs, or one with FP8")
    (tmp_path / "train.py").write_text(SCRIPT)
    kind = {"distributed_type": "MULTI_GPU"} if processes > 1 else {}
    config = mp_yaml(tmp_path, use_cpu="false", num_processes=processes, **kind)
    only = ("--only", "bf16+compile", "--only", "torchao-tensorwise+compile")
    command = [sys.executable, "-m", "mpguard", "tune", "--config", str(config), *only, "--format", "json", "train.py"]
    variables = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
    run = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=seconds(500))
    assert run.returncode == 0, run.stderr[-3000:]
    data = json.loads(run.stdout)
    rows = {row["name"]: row for row in data["candidates"]}
    assert {row["state"] for row in rows.values()} == {"measured"}, rows
    for row in rows.values():
        low, high = row["interval"]
        assert low <= row["ms"] <= high
        assert row["gib"] > 1 and abs(row["loss_gap"]) < 0.01
    assert rows[data["winner"]]["ms"] <= 1.02 * min(row["ms"] for row in rows.values())
    assert keys.load_policy(config).settings().items() >= rows[data["winner"]]["overrides"].items()
