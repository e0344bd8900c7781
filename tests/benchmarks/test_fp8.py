"""benchmarks/fp8.py: the program itself, with a tiny model on the CPU; speed is measured on a GPU only."""

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


def test_a_variant_is_measured_next_to_stock(tmp_path: Path) -> None:
    result = tmp_path / "fp8.json"
    program = REPOSITORY / "benchmarks" / "fp8.py"
    run = in_fork(
        [program, "--quick", "--only", "masters", "--output", result],
        cwd=tmp_path,
        timeout=seconds(240),
        program=run_python,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    made: dict[str, Any] = json.loads(result.read_text("utf-8"))
    stock, row = made["rows"]
    assert (stock["variant"], row["variant"]) == ("stock", "fp8, head, fast, masters")
    assert row["loss"][1] == pytest.approx(stock["loss"][1], rel=0.02), "the same training"
    assert row["ratio"] > 0 and row["lo"] <= row["ms"] <= row["hi"]
    assert row["proof"] == "in force" and row["failures"] == []
    assert row["rows"]["fp8 head"] == "lm_head in fp8" and row["rows"]["parameters"].startswith("bf16")
    assert made["versions"]["torch"] and made["device"] == "cpu" and made["sizes"]["tiny"]


def test_the_page_has_the_figures_that_were_measured() -> None:
    result = json.loads((REPOSITORY / "benchmarks/results/fp8.json").read_text(encoding="utf-8"))
    page = (REPOSITORY / "docs/fp8.md").read_text(encoding="utf-8")
    measured = [row for row in result["rows"] if "ratio" in row]
    assert len(measured) >= 5
    for row in measured:
        bound = result["bounds"].get(f"{row['size']}, {row['variant']}")
        text = "" if bound is None else f"{bound:.2f}" if row["ratio"] >= bound else f"{bound:.2f}, missed"
        assert f"| {row['ms']:.1f} | {row['ratio']:.2f} | {row['flow_ratio']:.2f} | {text} |" in page
