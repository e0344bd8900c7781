"""`compile: auto` through a whole launch: what is chosen is said, and is what runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import mp_yaml

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROGRAM = Path(__file__).parent.parent.parent / "benchmarks/gpu_programs/accelerated.py"
CURRENT = "fp8: hybrid, fp8_recipe: tensorwise"


@pytest.mark.parametrize(
    ("fields", "compiled", "says"),
    [
        (f"{CURRENT}, backend: torchao", "compiled", "compile: auto is on here"),
        (f"{CURRENT}, backend: te", "not compiled", ""),
        ("fp8: hybrid, fp8_recipe: delayed", "not compiled", ""),
    ],
)
def test_auto(tmp_path: Path, fields: str, compiled: str, says: str) -> None:
    pytest.importorskip("transformer_engine.pytorch" if "torchao" not in fields else "torchao")
    policy = f"{{mpguard_recipe: bf16_mixed, mpguard_overrides: {{{fields}}}}}"
    config = mp_yaml(tmp_path, use_cpu="false", fp8_config=policy)
    command = [sys.executable, "-m", "mpguard", "launch", "--config", str(config), "--proof-json", "proof.json"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    run = subprocess.run(
        [*command, str(PROGRAM), "--steps", "5", "--out", str(tmp_path / "out.json")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    made = json.loads((tmp_path / "proof.json").read_text())
    rows = {row["name"]: row["found"] for row in made["rows"]}
    assert made["verdict"] == "in force" and rows["compile"] == compiled
    assert says in run.stderr if says else "compile: auto" not in run.stderr
