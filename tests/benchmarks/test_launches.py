"""benchmarks/launches.py: it runs, and the committed figures are those that the docs argue from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import REPOSITORY
from processes import in_fork, run_python

RESULT = REPOSITORY / "benchmarks" / "results" / "launches.json"


def test_each_variant_is_measured_against_stock(tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    words = [REPOSITORY / "benchmarks" / "launches.py", "--quick", "--rounds", "2", "--output", path]
    run = in_fork(words, cwd=tmp_path, program=run_python)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert rows.keys() == {"stock", "profiled", "mpguard"} == json.loads(RESULT.read_text("utf-8"))["rows"].keys()
    assert rows["stock"]["step_ms_ratio"] == [1.0, 1.0, 1.0]
    assert all(row["step_ms"] > 0 and row["launch_us"] > 0 for row in rows.values())


def test_the_proof_leaves_launches_as_fast_as_they_were() -> None:
    rows = json.loads(RESULT.read_text("utf-8"))["rows"]
    _, profiled, _ = rows["profiled"]["launch_us_ratio"]
    _, guarded, _ = rows["mpguard"]["launch_us_ratio"]
    assert profiled > 1.15 and guarded < 1.05
