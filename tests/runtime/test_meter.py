"""What a worker measures for `mpguard tune`, in each engine; and that all ranks end at the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from paths import PROGRAMS
from processes import in_fork, mp_yaml, ranks_in_fork, transcript

from mpguard.runtime import meter

FP16 = """
import torch
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
for step in range(60):
    with torch.autocast("cpu", torch.float16):
        loss = (model(torch.ones(4, 16)).float() * 0 + 1 + step).mean() + model.weight.float().sum() * 2.0**-12
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def measured(folder: Path, rank: int = 0) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    assert len(data["ms"]) == len(data["losses"]) - 1 and min(data["ms"]) > 0 and data["bytes"] > 2**26
    return data


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        ("fsdp2", {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": "{fsdp_version: 2}"}),
        ("zero2", {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": "{zero_stage: 2}"}),
    ],
)
def test_ranks_end_together(engine: str, keys: dict[str, Any], tmp_path: Path) -> None:
    if engine == "zero2":
        pytest.importorskip("deepspeed")
    config = mp_yaml(tmp_path, **keys)
    proof = tmp_path / "proof.json"
    words = ["--config", config, "--proof-json", proof, PROGRAMS / "loop.py", engine, "--steps", "500"]
    for run in ranks_in_fork(words, cwd=tmp_path, **meter.settings(tmp_path, 3, 5)):
        assert run.returncode == 0 and '"gradient"' not in run.stdout, transcript(run)
    assert [len(measured(tmp_path, rank)["losses"]) for rank in (0, 1)] == [8, 8]
    assert None not in measured(tmp_path)["losses"]
    data = json.loads(proof.read_text())
    assert data["verdict"] == "in force" and data["run"][0]["looks"] == [1, 2], "later checks would be timed"


def test_skipped_steps_count_and_losses_are_those_before_the_scale(tmp_path: Path) -> None:
    (tmp_path / "fp16.py").write_text(FP16)
    config = mp_yaml(tmp_path, recipe="fp16_mixed", mixed_precision="fp16")
    run = in_fork(["--config", config, "fp16.py"], cwd=tmp_path, **meter.settings(tmp_path, 30, 10))
    assert run.returncode == 0, transcript(run)
    losses = measured(tmp_path)["losses"]
    assert [round(loss) for loss in losses] == list(range(1, 41)), "40 steps, the first of them skipped"
