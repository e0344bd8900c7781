"""`compile: auto` through a whole launch: the choice is reported, and is what runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import seconds
from processes import mp_yaml

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROGRAMS = Path(__file__).parent.parent.parent / "benchmarks/gpu_programs"
CURRENT = "fp8: hybrid, fp8_recipe: tensorwise"


@pytest.mark.parametrize("loop", ["accelerated.py", "loop.py"])
@pytest.mark.parametrize(
    ("fields", "compiled", "expected"),
    [
        (f"{CURRENT}, backend: torchao", "compiled", "compile: auto is on here"),
        (f"{CURRENT}, fp8_param: auto", "compiled", "compile: auto is on here"),
        (f"{CURRENT}, backend: te", "not compiled", ""),
        ("fp8: hybrid, fp8_recipe: delayed", "not compiled", ""),
    ],
)
def test_auto(tmp_path: Path, fields: str, compiled: str, expected: str, loop: str) -> None:
    """With an Accelerator, and in a loop of one's own."""
    run, made = launched(tmp_path, fields, loop)
    rows = {row["name"]: row["found"] for row in made["rows"]}
    assert made["verdict"] == "in force" and rows["compile"] == compiled
    assert expected in run.stderr if expected else "compile: auto" not in run.stderr


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        ("single", {}),
        ("ddp", {}),
        ("fsdp1", {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 1}"}),
        ("fsdp2", {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2}"}),
        ("deepspeed-zero1", {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: 1}"}),
        ("deepspeed-zero3", {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: 3}"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_engines_of_ones_own_are_compiled(tmp_path: Path, strategy: str, keys: dict[str, str]) -> None:
    """What `auto` has compiled in place learns in each engine, and is proven; one process each."""
    pytest.importorskip("torchao")
    fields = f"{CURRENT}, backend: torchao"
    run, made = launched(tmp_path, fields, "loop.py", "--strategy", strategy, **keys)
    rows = {row["name"]: row["found"] for row in made["rows"]}
    assert made["verdict"] == "in force" and rows["compile"] == "compiled", run.stderr[-3000:]
    facts = json.loads((tmp_path / "out.json").read_text())
    assert not facts["unchanged"], facts


def launched(
    folder: Path, fields: str, loop: str, *words: str, **keys: str
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """A short training that succeeds, and its proof."""
    pytest.importorskip("transformer_engine.pytorch" if "torchao" not in fields else "torchao")
    policy = f"{{mpguard_recipe: bf16_mixed, mpguard_overrides: {{{fields}}}}}"
    config = mp_yaml(folder, use_cpu="false", fp8_config=policy, **keys)
    given = ["--config", str(config), "--proof-json", "proof.json"]
    if loop == "accelerated.py":
        command = [sys.executable, "-m", "mpguard", "launch", *given]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "mpguard.run", *given]
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    run = subprocess.run(
        [*command, str(PROGRAMS / loop), *words, "--steps", "5", "--out", str(folder / "out.json")],
        cwd=folder, env={name: value for name, value in os.environ.items() if name not in outer},
        capture_output=True, text=True, timeout=seconds(200), check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return run, json.loads((folder / "proof.json").read_text())
