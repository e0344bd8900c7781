"""Trials: real scripts in processes of their own, measured and ended, whatever they do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from limits import seconds
from paths import PROGRAMS
from processes import environment, mp_yaml

pytest.importorskip("accelerate")

from mpguard.policy.recipes import recipe
from mpguard.tune.candidates import CONFIGURED, TuneCandidate
from mpguard.tune.model import TrialResult
from mpguard.tune.trial import PLACEHOLDER, Trials

SCRIPT = PROGRAMS / "tuned.py"
CONFIGURATION = TuneCandidate(CONFIGURED, {}, recipe("bf16_mixed"))
WARMUP, STEPS = 4, 6


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables = environment()
    for name in os.environ.keys() - variables.keys():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def measured(folder: Path, *arguments: object, limit: float = 900, **keys: object) -> TrialResult:
    """Run the script as configured."""
    config = mp_yaml(folder, **keys)
    words = [str(word) for word in arguments]
    argv = ["--config", str(config), str(SCRIPT), *words]
    return Trials(folder / "trials", argv, len(words), warmup=WARMUP, steps=STEPS, limit=limit).measure(
        CONFIGURATION, 1
    )


def check(result: TrialResult, steps: int = STEPS) -> None:
    assert result.state == "measured", result.reason
    assert len(result.ms) == len(result.losses) == steps and min(result.ms) > 0
    assert all(loss is not None and 0 < loss < 10 for loss in result.losses)
    assert result.bytes is not None and result.bytes > 2**26


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def test_a_loop_that_catches_everything_and_reads_input_is_ended_without_its_last_lines(tmp_path: Path) -> None:
    check(measured(tmp_path, "plain", "--fault", "catches", "--output", PLACEHOLDER))
    out = tmp_path / "trials" / "as-configured-1" / "out"
    assert list(out.iterdir()) == [], "neither an except nor a finally block has run"


def test_two_processes_of_accelerate_end_at_the_same_step(tmp_path: Path) -> None:
    check(measured(tmp_path, "accelerate", distributed_type="MULTI_CPU", num_processes=2))
    ranks = sorted((tmp_path / "trials" / "as-configured-1").glob("rank-*.json"))
    assert [len(json.loads(path.read_text())["losses"]) for path in ranks] == [WARMUP + STEPS] * 2


def test_a_trainer_that_is_shorter_and_writes_checkpoints(tmp_path: Path) -> None:
    """All of its steps but the first half count; its checkpoints are in the folder that it was given."""
    check(measured(tmp_path, "trainer", "--steps", 8, "--output", PLACEHOLDER), steps=4)
    assert (tmp_path / "trials" / "as-configured-1" / "out" / "checkpoint-5").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mp.yaml", "trials"]


@pytest.mark.parametrize(
    ("arguments", "state", "reason"),
    [
        (["--fault", "error"], "failed", "exit status 1: RuntimeError: the shards do not fit"),
        (["--fault", "memory"], "failed", "out of memory: RuntimeError"),
        (["--steps", "4"], "failed", "the script ended after 4 optimizer steps; 6 are needed"),
        (["--fault", "silent"], "failed", "the script ended without an optimizer step that mpguard can observe"),
        (["--fault", "half"], "refused", "optimizer"),
    ],
)
def test_bad_scripts(arguments: list[str], state: str, reason: str, tmp_path: Path) -> None:
    result = measured(tmp_path, "plain", *arguments)
    assert (result.state, result.ms) == (state, ()) and reason in result.reason, result


def test_a_script_that_hangs_and_ignores_signals_leaves_no_process(tmp_path: Path) -> None:
    result = measured(tmp_path, "plain", "--fault", "hang", limit=seconds(8))
    assert result.state == "failed" and result.reason.startswith("no end after"), result
    processes = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(processes) == 2 and not any(map(running, processes))
