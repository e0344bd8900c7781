"""benchmarks/weight_casts.py: the committed figures, from which docs/limits.md argues, are still those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchao", reason="the real library runs here")

from paths import REPOSITORY
from processes import in_fork, run_python


def test_weights_are_rounded_twice_and_no_counter_sees_each_change(tmp_path: Path) -> None:
    result = tmp_path / "weight_casts.json"
    program = REPOSITORY / "benchmarks" / "weight_casts.py"
    run = in_fork([program, "--output", result], cwd=tmp_path, program=run_python)
    assert run.returncode == 0, run.stdout + run.stderr
    made, committed = (
        json.loads(path.read_text("utf-8"))
        for path in (result, REPOSITORY / "benchmarks" / "results" / "weight_casts.json")
    )
    assert made["traffic"] == committed["traffic"] and made["changes"] == committed["changes"]
    unseen = {name for name, shown in made["changes"].items() if not any(shown.values())}
    assert {"data.copy_", "data.clamp_"} <= unseen
