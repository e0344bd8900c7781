"""benchmarks/parallel.py: what it reads in the output of a program."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from paths import REPOSITORY

STEP = """mpguard: 56 of 57 Linear layers in FP8 (torchao tensorwise)
step 1 proven in force on all 4 ranks · recipe hopper_bf16_with_fp8_mixed
  engine         ddp                                                 as asked
  compute        fp8 92.5 %, bf16 7.55 %                             as asked
  fp8            56 of 57 Linear (torchao tensorwise)                as asked
  fp8 products   92 % of the matmuls
  reduction      none: each rank has a part of the model
"""
RESULT = 'RESULT {"first": 9.2, "last": 2.1, "first_step_s": 35.4, "step_ms": 92.7}\n'
END = "in force at steps 1-36 of 40 (5 checks)\n"


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = REPOSITORY / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("parallel", folder / "parallel.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "parallel", made)
    spec.loader.exec_module(made)
    return made


def test_a_run_that_is_proven_to_its_end(parallel: ModuleType) -> None:
    row = parallel.read(STEP + RESULT + END, 0)
    assert (row["state"], row["first_step_s"], row["end"]) == ("proven", 35.4, END.strip())
    assert row["rows"] == {
        "compute": "fp8 92.5 %, bf16 7.55 %",
        "fp8": "56 of 57 Linear (torchao tensorwise)",
        "reduction": "none: each rank has a part of the model",
    }


@pytest.mark.parametrize(
    ("text", "status", "state"),
    [
        (STEP, 124, "proven at step 1, not finished"),
        (STEP + RESULT, 0, "failed"),  # nothing says that it was in force to the end
        (STEP + RESULT + END, 1, "failed"),
        ("mpguard: not in force: FSDP2 reduces in BF16\n", 1, "refused"),
        ("Traceback\nValueError: no\n", 1, "failed"),
        ("", 124, "failed"),
    ],
)
def test_every_other_run_is_not_proven(parallel: ModuleType, text: str, status: int, state: str) -> None:
    row = parallel.read(text, status)
    assert row["state"] == state
    assert ("reason" in row) == (state in ("refused", "failed"))


def test_rows_that_are_not_measured_again_stay(parallel: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="its version is written")
    path = tmp_path / "parallel.json"
    options = type("Options", (), {"merge": True, "gpus": 4, "at_once": 3, "limit": 130.0})()
    parallel.write(path, [{"program": "ddp", "recipe": "bf16_mixed", "state": "failed"}], options)
    new = [{"program": each, "recipe": "bf16_mixed", "state": "proven"} for each in ("ddp", "ep")]
    parallel.write(path, new[:1], options)
    parallel.write(path, new[1:], options)
    made = json.loads(path.read_text("utf-8"))
    assert made["rows"] == new and made["gpus"] == 4 and "torch" in made["versions"]
