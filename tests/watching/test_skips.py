"""Each skipped step is reported, at its step, under every engine: plain, accelerate, DeepSpeed, FSDP."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import free_port, in_fork, ranks_in_fork, results, run_python, transcript

PROGRAM = PROGRAMS / "watch_skips.py"


def reports(run: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert run.returncode == 0 and "its own code failed" not in run.stderr, transcript(run)
    return {line["kind"]: line for line in results(run)}


def check(kind: str, line: dict[str, Any]) -> None:
    """The steps that were skipped, and no others, are reported; the numbers of the others are finite."""
    assert line["steps"] == list(range(1, 9)), kind
    assert line["skipped"] == line["marked"] == [3, 6], kind
    assert line["applied"] == [1, 2, 4, 5, 7, 8], kind
    finite = [step for step, loss in zip(line["steps"], line["losses"], strict=True) if isinstance(loss, float)]
    assert finite == [1, 2, 4, 5, 7, 8], kind
    assert "loss_scale_collapse" not in line["events"], kind


def test_plain_and_accelerate(tmp_path: Path) -> None:
    found = reports(in_fork([PROGRAM], cwd=tmp_path, program=run_python))
    assert set(found) == {"plain", "fused", "accelerate"}
    for kind, line in found.items():
        check(kind, line)
        assert line["scales"] == [1024.0] * 3 + [512.0] * 3 + [256.0] * 2, kind
        assert line["losses"][0] == pytest.approx(1.0565, rel=1e-3), "unscaled, and not divided by accumulation"
        assert line["norms"][0] == pytest.approx(0.8588, rel=1e-3), "unscaled"


def test_deepspeed(tmp_path: Path) -> None:
    """DeepSpeed's `BF16_Optimizer` skips a step without any message."""
    pytest.importorskip("deepspeed")
    found = reports(in_fork([PROGRAM, "deepspeed"], cwd=tmp_path, program=run_python, MASTER_PORT=str(free_port())))
    assert len(found) == 6 and any(kind.endswith("BF16_Optimizer") for kind in found), list(found)
    for kind, line in found.items():
        check(kind, line)
        assert line["losses"][0] == pytest.approx(1.0565, rel=0.02) and isinstance(line["norms"][0], float), kind
        assert (line["scales"][0] is not None) == ("fp16" in kind), kind


def test_fsdp2(tmp_path: Path) -> None:
    first, *_ = ranks_in_fork([PROGRAM, "fsdp2"], cwd=tmp_path, program=run_python)
    (line,) = reports(first).values()
    check("fsdp2", line)
