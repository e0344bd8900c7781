"""On a terminal no command prints a line that is wider than it, paths and addresses apart; with LANG=C all is ASCII."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mpguard import doctor
from mpguard.cli import main
from mpguard.doctor import Diagnosis, MachineProblem, RecipeCell
from mpguard.policy import hardware
from mpguard.policy.hardware import Hardware

#: What is not broken: paths, addresses, and strings that are one word.
_UNBROKEN = re.compile(r"\S*[/\\]\S*")

CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: bf16
num_processes: 1
use_cpu: true
fp8_config:
  mpguard_recipe: bf16_mixed
"""
SCRIPT = """import torch
torch.backends.cuda.matmul.allow_tf32 = True
with torch.autocast(device_type="cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16):
    pass
"""
MACHINE = Diagnosis(
    machine={
        "gpu": "NVIDIA H100 80GB HBM3",
        "gpus": [{"name": "NVIDIA H100 80GB HBM3"}],
        "visible_gpus": 2,
        "driver": "550.54",
        "driver_cuda": "12.4",
        "torch_cuda": "13.0",
    },
    packages={"torch": "2.13.0+cu130", "accelerate": "1.15.0"},
    problems=(MachineProblem("torch needs a newer driver than the one that is loaded on this machine", "pip " * 30),),
    cells=(
        RecipeCell("nemotron_3_super_bf16_with_nvfp4_mixed", "te", "single", False, "needs compute capability 10.0"),
        *(RecipeCell("bf16_mixed", "-", f"deepspeed-zero{n}", False, "deepspeed is not installed") for n in (1, 2, 3)),
    ),
)
COMMANDS = (
    "--help",
    "--nope",
    "recipes",
    "recipes bf16_mixd",
    "recipes bf16_mixed",
    "recipes bf16_mixed --for accelerate",
    "recipes bf16_mixed --for deepspeed",
    "recipes bf16_mixed --for fsdp2",
    "recipes bf16_with_fp8_current_scaling_mixed --for axolotl",
    "recipes bf16_mixed --for megatron",
    "rule --all",
    "rule MPG201",
    "doctor --fix-hints",
    "estimate llama-3.1-8b --gpus 8 --seq 4096",
    "estimate llama-3.1-8b --gpu h100 --lora 16",
    "explain mp.yaml train.py",
    "apply --check hopper_bf16_with_fp8_mixed mp.yaml",
    "init bf16_mixed --strategy nope",
    "init bf16_mixed --strategy deepspeed-zero2 -o new.yaml --force",
    "compare slow.jsonl --baseline run.jsonl",
    "hook status",
    *(f"{name} --help" for name in ("lint", "launch", "tune", "sensitivity", "init", "estimate", "compare", "explain")),
)


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "detect", Hardware)
    monkeypatch.setattr(doctor, "diagnose", lambda **_: MACHINE)
    Path("mp.yaml").write_text(CONFIG)
    Path("train.py").write_text(SCRIPT)
    for name, factor in (("run", 1.0), ("slow", 1.04)):
        lines: list[dict[str, Any]] = [{"event": "run", "version": 1, "level": "light", "rank": 0, "ranks": 1}]
        for step in range(1, 301):
            loss = factor * (2.0 + 3.0 / step + 0.05 * ((step * 7919) % 13) / 13)
            lines.append({"step": step, "loss": loss, "grad_norm": 1.0, "ms": 12.5, "memory": 2**30})
        event = {"event": "nonfinite", "step": 3, "rank": 0, "module": None, "value": None, "suggestion": None}
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, [*lines, event])) + "\n")
    return tmp_path


def shown(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    out, err = Tty(), Tty()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    main(command.split())
    text = out.getvalue() + err.getvalue()
    assert text.strip(), "something is printed"
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\]8;[^\x1b]*\x1b\\", "", text).splitlines()


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider(folder: Path, command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C" if width == 60 else "C.UTF-8")
    lines = shown(command, width, monkeypatch)
    wide = [line for line in lines if len(line) > width and not _UNBROKEN.search(line)]
    assert not wide, wide[:3]
    if width == 60:
        assert all(line.isascii() for line in lines), [line for line in lines if not line.isascii()][:3]
