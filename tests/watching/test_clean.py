"""Runs without a fault: no alarm, losses and weights bit-equal to those without the watch; its failure ends no run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import in_fork, results, run_python, transcript

from mpguard.compare import compare
from mpguard.compare.readers import read_run


def test_five_clean_runs_and_a_failure(tmp_path: Path) -> None:
    run = in_fork([PROGRAMS / "watch_clean.py"], cwd=tmp_path, program=run_python)
    assert run.returncode == 0, transcript(run)
    found = {line["kind"]: line for line in results(run)}
    failure, fp8 = found.pop("failure"), found.pop("fp8")
    assert set(found) == {"fp32", "bf16", "fp16", "gan", "compiled"}
    for kind, line in found.items():
        for level in ("light", "full"):
            assert line[level], f"{kind}: losses differ under {level}"
            assert set(line[f"{level} events"]) <= {"run", "step", "skipped_step", "underflow_shares"}, kind
            assert line[f"{level} steps"] in (100, 150), kind
    check_comparison(tmp_path)
    check_fp8(fp8)
    assert failure["same"], "the run continues as it would without the watch"
    assert failure["printed"].count("its own code failed") == 1, failure["printed"]
    assert "is no longer watched" in failure["printed"]


def check_comparison(folder: Path) -> None:
    """`mpguard compare` reads the files as they were written: two of one training, and two of different ones."""
    logs = {name: read_run(folder / f"{name}.jsonl") for name in ("fp32-light", "fp32-full", "bf16-light")}
    light = logs["fp32-light"]
    assert light.source == "watch" and len(light.loss) == 150 and light.notes == () and light.events == ()
    assert len(light.ms) == 149 and light.grad_norm
    found = compare({name: [log] for name, log in logs.items()}, "fp32-light").verdicts
    verdicts = {each.name: each for each in found}
    assert verdicts["fp32-full"].verdict == "same" and verdicts["fp32-full"].difference == 0
    assert verdicts["bf16-light"].difference != 0


def check_fp8(events: dict[str, list[dict[str, Any]]]) -> None:
    """One batch of 40 times larger inputs saturates; inputs that grow by 3 % a step make the scale drift."""
    assert events["clean"] == []
    (spike,) = events["spike"]
    assert (spike["event"], spike["step"], spike["module"]) == ("fp8_saturation", 120, "1")
    assert spike["value"]["times"]["1: input"] == pytest.approx(40, rel=0.5)
    assert "fp8_margin" in spike["suggestion"]
    (growth,) = events["growth"]
    assert (growth["event"], growth["module"]) == ("fp8_scale_drift", "1") and growth["step"] > 100
