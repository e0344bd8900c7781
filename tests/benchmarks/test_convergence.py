"""benchmarks/convergence.py: an arm is trained with a tiny model on the CPU; verdicts and plot of losses made up."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from limits import seconds
from paths import REPOSITORY
from processes import in_fork, run_python

PROGRAM = REPOSITORY / "benchmarks" / "convergence.py"


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("convergence", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["convergence"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_an_arm_is_trained_under_mpguard_and_not_twice(tmp_path: Path) -> None:
    for name in ("accelerate", "transformers", "torchao"):
        pytest.importorskip(name, reason="the real library runs here")
    result = tmp_path / "convergence.json"
    words = [PROGRAM, "run", "--tiny", "--only", "fp8, all opt-ins", "--output", result]
    for turn in range(2):
        run = in_fork(words, cwd=tmp_path, timeout=seconds(240), program=run_python)
        assert run.returncode == 1, "the other arms are still missing"
        assert ("in force" in run.stdout) is (turn == 0), run.stdout + run.stderr
        arm = json.loads(result.read_text("utf-8"))["arms"]["fp8, all opt-ins"]
        assert len(arm["loss"]) == 20 and arm["loss"][-1] < arm["loss"][0] - 0.5
        rows = arm["proof"]["rows"]
        assert arm["proof"]["verdict"] == "in force" and rows["fp8 head"] == "lm_head in fp8"
        assert rows["parameters"].startswith("bf16") and rows["fp8"].startswith("15 of 29 Linear")


def test_verdicts_and_plot(program: Any) -> None:
    draw = random.Random(0)
    base = [1 + 2 / (1 + step / 40) + draw.gauss(0, 0.05) for step in range(2000)]
    losses = {
        "bf16": base,
        "fp8": [value * 1.0003 + draw.gauss(0, 0.01) for value in base],
        "fp8, fp8_head": [value * 1.02 + draw.gauss(0, 0.01) for value in base],
    }
    found = program.verdicts(losses)
    assert [found["fp8"][each]["verdict"] for each in ("whole", "end")] == ["same", "same"]
    assert [found["fp8, fp8_head"][each]["verdict"] for each in ("whole", "end")] == ["different", "different"]
    assert found["fp8"]["end"]["window"] == (1501, 2000)
    assert abs(found["fp8, fp8_head"]["last"] - 0.02) < 0.002
    svg = ET.fromstring(program.plot({"arms": {name: {"loss": each} for name, each in losses.items()}}))
    lines = [each for each in svg.iter() if each.tag.endswith("polyline")]
    assert len(lines) == len(losses) + len(losses) - 1
    assert {len(str(each.get("points")).split()) for each in lines} == {2000 // 50}
    labels = {each.text for each in svg.iter() if each.tag.endswith("text")}
    assert labels >= set(losses)
