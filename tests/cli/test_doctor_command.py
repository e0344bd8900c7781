"""`mpguard doctor`: text, JSON, hints, one recipe, and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpguard.cli import main
from mpguard.doctor import Diagnosis, MachineProblem, RecipeCell

REPORT = Diagnosis(
    machine={"gpu": "NVIDIA H100", "gpus": [{"name": "NVIDIA H100"}], "visible_gpus": 2, "driver": "550.54",
             "driver_cuda": "12.4", "torch_cuda": "13.0", "cudnn": 91300},
    packages={"torch": "2.13.0+cu130", "accelerate": "1.15.0"},
    problems=(MachineProblem("torch needs a newer driver", "pip install torch"),),
    cells=(
        RecipeCell("bf16_mixed", "-", "single", True, "a small matmul ran: gemm", True),
        RecipeCell("bf16_mixed", "-", "fsdp1", False, "accelerate is not installed"),
        RecipeCell("mxfp8", "te", "single", False, "needs Blackwell"),
    ),
)  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import mpguard.doctor

    monkeypatch.setattr(mpguard.doctor, "diagnose", lambda **_: REPORT)


@pytest.mark.usefixtures("machine")
def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "2 x NVIDIA H100" in out and "550.54, CUDA 12.4" in out and "cudnn" in out
    assert "problem: torch needs a newer driver" in out and "pip install torch" not in out
    assert "yes: single" in out and "not fsdp1: accelerate is not installed" in out and "no: needs Blackwell" in out
    assert main(["doctor", "--fix-hints"]) == 1
    assert "fix: pip install torch" in capsys.readouterr().out


@pytest.mark.usefixtures("machine")
def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"version", "machine", "packages", "problems", "cells", "libraries"}
    assert found["version"] == 1
    assert found["problems"] == [{"what": "torch needs a newer driver", "fix": "pip install torch"}]
    assert found["cells"][1] == {
        "recipe": "bf16_mixed", "backend": "-", "strategy": "fsdp1", "works": False,
        "reason": "accelerate is not installed",
    }  # fmt: skip


@pytest.mark.usefixtures("machine")
def test_one_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--recipe", "bf16-mixed"]) == 1
    out = capsys.readouterr().out
    assert "a small matmul ran: gemm" in out and "mxfp8" not in out
    assert main(["doctor", "--recipe", "bf61_mixed"]) == 2
    assert "there is no recipe `bf61_mixed`" in capsys.readouterr().err


def test_without_torch_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after `pip install mpguard`: the packages of this environment are hidden."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert main(["doctor", "--fix-hints"]) == 1
    out = capsys.readouterr().out
    assert "torch is not installed" in out and "pip install 'mpguard[accelerate]'" in out
