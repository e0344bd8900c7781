"""`mpguard init` without a recipe: what it asks, what it recommends and why, and that it never waits for no one."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import seconds

from mpguard.cli import init_questions, main
from mpguard.cli.init_questions import Answers, recommend
from mpguard.estimate import read_model
from mpguard.policy import hardware


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "detect", hardware.Hardware)
    return tmp_path


def test_without_a_terminal_it_does_not_wait(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`stdin` is neither read nor needed."""
    assert main(["init"]) == 2
    err = capsys.readouterr().err
    assert "init needs a recipe, and cannot ask for one here" in err and "--yes" in err
    assert not list(folder.iterdir())


def test_yes_takes_the_recommendation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "Wrote mp.yaml: fp32, single, 1 process" in out and "recipe fp32: the CPU computes BF16 in software" in out
    assert main(["init", "--yes", "--force", "--format", "json"]) == 0
    assert "recipe fp32" in json.loads(capsys.readouterr().out)["notes"][0]


@pytest.mark.parametrize(
    ("answers", "name", "strategy", "reason"),
    [
        (("a100-80gb", 1, "llama-3.2-1b", "accelerate", "speed"), "bf16_mixed", "single", "of 80 per GPU"),
        (("a100-80gb", 8, "llama-3.2-1b", "accelerate", "speed"), "bf16_mixed", "ddp", "strategy ddp: estimated"),
        (("a100-80gb", 8, "llama-3.1-8b", "accelerate", "speed"), "bf16_mixed", "fsdp2", "not ddp: estimated 199 GiB"),
        (("a100-80gb", 8, "llama-3.1-70b", "accelerate", "speed"), "bf16_mixed", "fsdp2", "it does not fit"),
        (("a100-80gb", 8, "llama-3.1-8b", "deepspeed", "speed"), "bf16_mixed", "deepspeed-zero2", "zero2: estimated"),
        (("a100-80gb", 8, "gpt2", "accelerate", "memory"), "bf16_mixed", "fsdp2", "strategy fsdp2: estimated"),
        (("h100", 8, None, "accelerate", "speed"), "bf16_with_fp8_current_scaling_mixed", "ddp", "Hopper: FP8"),
        (("h100", 8, None, "accelerate", "accuracy"), "bf16_mixed", "ddp", "most accurate"),
        (("v100-16gb", 1, None, "accelerate", "speed"), "fp16_mixed", "single", "Volta has no BF16"),
        ((None, 0, "gpt2", "accelerate", "speed"), "fp32", "single", "one process on the CPU"),
    ],
)
def test_the_recommendation(answers: tuple[str, int, str, str, str], name: str, strategy: str, reason: str) -> None:
    gpu, gpus, model, framework, wish = answers
    found = recommend(Answers(gpu, gpus, read_model(model) if model else None, framework, wish))
    assert (found.recipe, found.strategy) == (name, strategy)
    assert any(reason in each for each in found.reasons), found.reasons


def test_what_does_not_work_here_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's answer for this machine decides: here FP8's library is not installed."""
    monkeypatch.setattr(init_questions, "of_this_machine", lambda: "h100")
    machine = hardware.Hardware("NVIDIA H100", (9, 0), 1, (13, 0), {"torchao": "0.18.0"})
    monkeypatch.setattr(hardware, "detect", lambda: machine)
    from mpguard.doctor import Diagnosis, RecipeCell

    cells = (
        RecipeCell("bf16_with_fp8_current_scaling_mixed", "torchao", "single", False, "a small matmul failed"),
        RecipeCell("bf16_mixed", "-", "single", True, ""),
    )
    report = Diagnosis(machine={}, packages={}, problems=(), cells=cells)
    monkeypatch.setattr(init_questions.doctor, "diagnose", lambda **_: report)
    found = recommend(Answers("h100", 1, None, "accelerate", "speed"))
    assert found.recipe == "bf16_mixed" and "does not work here: a small matmul failed" in found.reasons[0]


def test_questions_in_a_real_terminal(folder: Path) -> None:
    """With a wrong answer, which is asked again, and defaults for empty ones."""
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "mpguard", "init"]
    process = subprocess.Popen(words, stdin=follower, stdout=follower, stderr=follower, cwd=folder, close_fds=True)
    os.close(follower)
    os.write(leader, b"h1000\na100-80gb\n8\nllama-3.1-8b\n\n\n")
    text, end = b"", time.monotonic() + seconds(60)
    while time.monotonic() < end:
        if not select.select([leader], [], [], 0.5)[0]:
            continue
        try:
            text += os.read(leader, 4096)
        except OSError:  # the other side is closed
            break
    assert process.wait(timeout=seconds(30)) == 0, text.decode()
    out = text.decode()
    assert "did you mean `h100`" in out and "How many of them [1]" in out
    assert "not ddp: estimated" in out and "fsdp2, 8 processes" in out and (folder / "mp.yaml").is_file()


def test_an_end_of_the_input_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(""))
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["init"]) == 2
    assert "the input ended before all questions were answered" in capsys.readouterr().err
    assert not list(folder.iterdir())
