"""Trials: real scripts in processes of their own, measured and ended, whatever they do."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from paths import PROGRAMS
from processes import environment, mp_yaml

pytest.importorskip("accelerate")

from mpguard.policy.recipes import recipe
from mpguard.runtime import meter
from mpguard.tune import start, trial
from mpguard.tune.candidates import CONFIGURED, TuneCandidate
from mpguard.tune.model import TrialResult
from mpguard.tune.trial import PLACEHOLDER, Trials

SCRIPT = PROGRAMS / "tuned.py"
CONFIGURATION = TuneCandidate(CONFIGURED, {}, recipe("bf16_mixed"))
WARMUP, STEPS = 4, 6

#: What mpguard itself prints in a run.
PROVEN = "step 1 proven in force on 1 process\n  compute        bf16\nin force at steps 1-2 of 6 (2 checks)"

NOT_FINITE = "step 1: precision as asked on 1 process, but the loss is not finite\n  compute        bf16"


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
        (["--fault", "half"], "refused", "optimizer"),
    ],
)
def test_bad_scripts(arguments: list[str], state: str, reason: str, tmp_path: Path) -> None:
    result = measured(tmp_path, "plain", *arguments)
    assert (result.state, result.ms) == (state, ()) and reason in result.reason, result


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    result = measured(tmp_path, "plain", limit=0.5)
    assert result.state == "failed" and result.reason.startswith("no end after 0.5 s (--time-limit)"), result


@pytest.mark.parametrize(
    ("log", "status", "state", "reason"),
    [
        ("x", 137, "failed", "out of memory: a process was killed, as the host does when it has no memory left"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nValueError: y", 1, "failed",
         "out of memory: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        ("mpguard: not in force: no FP8 here", 1, "failed", "exit status 1: no output"),
        ("mpguard: compile: auto is on here: y\nKilled", 1, "failed", "exit status 1: Killed"),
        ("usage: train.py\ntrain.py: error: no --data", 2, "failed", "exit status 2: train.py: error: no --data"),
        (f"mpguard 0.1.0\n  mixed_precision  bf16\nno shards\n{PROVEN}", 3, "failed", "exit status 3: no shards"),
        (PROVEN, 3, "failed", "exit status 3: no output"),
        (NOT_FINITE, 3, "failed", "exit status 3: no output"),
        ("mpguard 0.1.0\nTraceback:\n  File x\nEOFError: EOF when reading a line", 1, "failed",
         "exit status 1: EOFError: EOF when reading a line (the script reads input, and tune gives it none)"),
        (f"epoch 1\n{PROVEN}", None, "failed",
         "no end after 60 s (--time-limit); its last output: epoch 1"),
        ("", 0, "failed", "the script ended without an optimizer step that mpguard can observe"),
        ("\nloading data\n", None, "failed", "no end after 60 s (--time-limit); its last output: loading data"),
    ],
)  # fmt: skip
def test_how_a_trial_has_ended(log: str, status: int | None, state: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(log)
    found = trial.result(tmp_path, status, WARMUP, 60)
    assert (found.state, found.reason) == (state, reason)


@pytest.mark.parametrize("verdict", ["in force", "not in force", None])
def test_a_refusal_is_read_from_its_record_and_the_proof(
    verdict: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line of the log decides: the script may print anything, and a progress bar may be in it."""
    for name, value in meter.settings(tmp_path, 1, 3).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    meter.write_refusal("rank 1: not proven: x")
    (tmp_path / "log.txt").write_text("  0%| | 0/4 [00:00<?, ?it/s]mpguard: something\n")
    if verdict is not None:
        (tmp_path / "proof.json").write_text(json.dumps({"verdict": verdict, "failures": ["compute: fp32"]}))
    found = trial.result(tmp_path, 1, WARMUP, 60)
    reason = "compute: fp32" if verdict == "not in force" else "rank 1: not proven: x"
    assert (found.state, found.reason) == ("refused", reason)


@pytest.mark.parametrize(
    ("words", "overrides", "status", "reason"),
    [
        (["--config", "missing.yaml", "t.py"], "{}", 2, "missing.yaml"),
        (["--config", "mp.yaml", "--num_processes", "2", "t.py"], "{}", 1, "`distributed_type: NO`"),
    ],
)
def test_what_the_launcher_refuses_is_recorded(
    words: list[str], overrides: str, status: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in meter.settings(tmp_path, 1, 3).items():
        monkeypatch.setenv(name, value)
    mp_yaml(tmp_path)
    (tmp_path / "t.py").write_text("")
    assert start.main([overrides, "--enforce", "error", *words]) == status
    (tmp_path / "log.txt").write_text("")
    found = trial.result(tmp_path, status, WARMUP, 60)
    assert found.state == "refused" and reason in found.reason and "--enforce" not in found.reason


@pytest.mark.parametrize(
    ("steps", "timed", "reason"),
    [(30, range(10, 30), ""), (12, range(6, 12), ""), (8, range(4, 8), ""), (4, (), "ended after 4 optimizer steps")],
)
def test_the_first_steps_are_dropped(steps: int, timed: Sequence[int], reason: str, tmp_path: Path) -> None:
    """Of a script that is shorter than the warm-up and some steps, those of its second half count."""
    measured = {"ms": [float(step) for step in range(1, steps)], "losses": [0.5] * steps, "bytes": 2**30}
    (tmp_path / "rank-0.json").write_text(json.dumps(measured))
    (tmp_path / "rank-1.json").write_text(json.dumps({**measured, "bytes": 2**31}))
    (tmp_path / "log.txt").write_text("")
    found = trial.result(tmp_path, 0, 10, 60)
    assert reason in found.reason
    if not reason:
        assert (found.ms, found.bytes) == (tuple(map(float, timed)), 2**31) and len(found.losses) == len(timed)
