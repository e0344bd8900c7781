"""accelerate's trackers get the numbers of the watch next to those of the script: its own, TensorBoard, W&B offline."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")
pytest.importorskip("accelerate", reason="its trackers are followed")

from paths import PROGRAMS
from processes import in_fork, results, run_python, transcript

from mpguard.compare.readers.tensorboard import read as read_tensorboard
from mpguard.compare.readers.wandb import read as read_wandb

NAMES = ("mpguard/grad_norm", "mpguard/ms")


def test_trackers(tmp_path: Path) -> None:
    installed = [name for name in ("tensorboard", "wandb") if importlib.util.find_spec(name)]
    run = in_fork([PROGRAMS / "watch_trackers.py", *installed], cwd=tmp_path, program=run_python)
    assert run.returncode == 0 and "its own code failed" not in run.stderr, transcript(run)
    (found,) = results(run)
    lines = {line["step"]: line for line in map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
             if line["event"] == "step"}  # fmt: skip
    expected = [[step, {name: lines[step][name.removeprefix("mpguard/")] for name in NAMES}] for step in (10, 20)]
    *steps, event, last = found["watched"]
    assert steps == expected and len(lines) == 30
    assert event == [30, {"mpguard/nonfinite": 1}] and last[0] == 30
    assert found["finished"], "nothing is logged after the script has closed its trackers"
    assert run.stderr.count("the tracker broken takes no values any more (OSError: the disk is full)") == 1
    if "tensorboard" in installed:
        (events,) = tmp_path.glob("watched/events.*")
        columns = read_tensorboard([events]).columns
        assert list(columns["mpguard/grad_norm"])[:2] == [10, 20], "later ones only where that costs little"
        assert list(columns["mpguard/ms"]) == [10, 20, 30] and list(columns["loss"]) == list(range(1, 31))
    if "wandb" in installed:
        (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        columns = read_wandb(log).columns
        assert set(columns["mpguard/step"].values()) == {10.0, 20.0, 30.0} and len(columns["loss"]) == 30
