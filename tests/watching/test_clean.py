"""Runs without a fault: no alarm, losses bit-equal to those without the watch; a failure of the watch ends no run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import in_fork, results, transcript


def stock(words: list[str]) -> int:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def test_five_clean_runs_and_a_failure(tmp_path: Path) -> None:
    run = in_fork([PROGRAMS / "watch_clean.py"], cwd=tmp_path, program=stock, timeout=300)
    assert run.returncode == 0, transcript(run)
    found = {line["kind"]: line for line in results(run)}
    failure = found.pop("failure")
    assert set(found) == {"fp32", "bf16", "fp16", "gan", "compiled"}
    for kind, line in found.items():
        for level in ("light", "full"):
            assert line[level], f"{kind}: losses differ under {level}"
            assert set(line[f"{level} events"]) <= {"run", "step", "skipped_step", "underflow_shares"}, kind
            assert line[f"{level} steps"] in (200, 300), kind
    assert failure["same"], "the run continues as it would without the watch"
    assert failure["printed"].count("its own code failed") == 1, failure["printed"]
    assert "is no longer watched" in failure["printed"]
