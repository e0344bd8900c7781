"""mpguard changes nothing in a program that is right: losses and weights are the same bit for bit, in each kind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import short_programs
from paths import PROGRAMS
from processes import in_fork, ranks_in_fork, run_file, run_module, transcript

import mpguard

PROGRAM = PROGRAMS / "neutral.py"


#: How closely the guarded programs are watched, one after the other.
LEVELS = ("light", "full")


def kinds(run: subprocess.CompletedProcess[str], times: int = 1) -> dict[str, dict[str, object]]:
    """Return the line of each kind of program; each has trained so many times, always with the same result."""
    assert run.returncode == 0 and "its own code failed" not in run.stderr, transcript(run)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"rank"')]
    found = {line["kind"]: line for line in lines}
    assert lines == [line for line in found.values() for _ in range(times)]
    return found


def test_one_process(tmp_path: Path) -> None:
    alone = kinds(in_fork([PROGRAM], cwd=tmp_path, program=run_file))
    policy = str(mpguard.recipe("bf16_mixed"))
    run = in_fork([PROGRAM], cwd=tmp_path, program=run_module, MPGUARD_POLICY=policy, LEVELS=" ".join(LEVELS))
    guarded = kinds(run, len(LEVELS))
    assert len(alone) >= 10 and "step 1 proven in force on 1 process" in run.stderr, transcript(run)
    assert guarded == alone


def test_two_processes(tmp_path: Path) -> None:
    alone = ranks_in_fork([PROGRAM], cwd=tmp_path, program=run_file)
    policy = str(mpguard.recipe("bf16_mixed"))
    guarded = ranks_in_fork([PROGRAM], cwd=tmp_path, program=run_module, MPGUARD_POLICY=policy, LEVELS=" ".join(LEVELS))
    assert "step 1 proven in force on all 2 ranks" in guarded[0].stderr, transcript(guarded[0])
    for with_mpguard, without in zip(guarded, alone, strict=True):
        assert kinds(with_mpguard, len(LEVELS)) == kinds(without) != {}


def test_a_warning_that_python_shows_once_is_shown_once(tmp_path: Path) -> None:
    """To enter `warnings.catch_warnings` would make Python show again whatever it has shown before."""
    script = (
        "import warnings\n"
        "def noisy(): warnings.warn('of the script')\n"
        "torch.amp.GradScaler('cpu')\n"
        "for _ in range(4): noisy(); torch.amp.GradScaler('cpu')\n"
    )
    ended = short_programs.run(tmp_path, script, recipe="fp16_mixed")
    assert ended.returncode == 0 and ended.stderr.count("UserWarning: of the script") == 1, transcript(ended)
