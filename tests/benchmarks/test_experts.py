"""benchmarks/experts.py: the program itself, with a tiny mixture on the CPU; speed is measured on a GPU only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchao", reason="the real library runs here")
pytest.importorskip("transformers", reason="the real library runs here")

from limits import seconds
from paths import REPOSITORY
from processes import in_fork, run_python


def test_all_variants_train_in_turns_and_are_proven(tmp_path: Path) -> None:
    result = tmp_path / "experts.json"
    program = REPOSITORY / "benchmarks" / "experts.py"
    run = in_fork([program, "--quick", "--output", result], cwd=tmp_path, timeout=seconds(240), program=run_python)
    assert run.returncode == 0, run.stdout + run.stderr
    made: dict[str, Any] = json.loads(result.read_text("utf-8"))
    rows = {row["variant"]: row for row in made["rows"]}
    assert {row["proof"] for row in rows.values()} == {"in force"}
    assert all(row["loss"][1] == pytest.approx(rows["bf16"]["loss"][1], rel=0.02) for row in rows.values())
    assert rows["bf16"]["experts"] == "in bf16"
    assert rows["fp8, experts"]["experts"].endswith("experts in fp8 (e4m3, a scale per row)")
    assert int(rows["fp8, experts"]["rows"]["fp8 products"].split()[0]) > 80
