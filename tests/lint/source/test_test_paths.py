"""Tests and benchmarks are known by their names, and rules about what a training loses report nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpguard.cli import main
from mpguard.lint.model.rule import Rule, rules
from mpguard.lint.source.test_paths import is_test

#: The scaler does not step (MPG203), and its class is deprecated (MPG302).
LOOP = """\
import torch

def test_step(model, loader):
    scaler = torch.cuda.amp.GradScaler()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.autocast("cuda", torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        optimizer.step(){}
"""


@pytest.mark.parametrize(
    "path",
    [
        "tests/step.py", "a/test/b/c/step.py", "test_step.py", "conftest.py", "tools/bench_step.py", "profile.py",
        "docs/profiling/two/step.py", "scripts/performance/model_test.py",
    ],
)  # fmt: skip
def test_tests_and_benchmarks(path: str) -> None:
    assert is_test(path)


@pytest.mark.parametrize(
    "path",
    [
        "train.py",
        "a/contest.py",
        "latest/train.py",
        "tests/a/b/c/train.py",
        "benchmarks/train.py",
        "profiler.py",
        "08_pytorch_profiling.py",
        "eval/model_test.py",
        "performance.py",
    ],
)
def test_other_files(path: str) -> None:
    assert not is_test(path)


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (b"import torch\nimport pytest\n", True),
        (b"from unittest import TestCase\n", True),
        (b"import torch\n\nmodel = train(torch.load('resnet.pt'))\n", False),
    ],
)
def test_a_file_that_pytest_collects_is_a_test_if_it_imports_a_test_framework(code: bytes, test: bool) -> None:
    assert is_test("checkpoint_test.py", code) == test
    assert not is_test("checkpoint.py", code)


@pytest.mark.parametrize(("name", "codes"), [("train.py", {"MPG203", "MPG302"}), ("test_train.py", {"MPG302"})])
@pytest.mark.parametrize("named", [True, False])
def test_what_is_reported(
    name: str, codes: set[str], named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(LOOP.format(""), encoding="utf-8")
    main(["lint", "--no-cache", "--format", "concise", name if named else "."])
    out = capsys.readouterr().out
    assert {code for code in rules() if f" {code} " in out} == codes, out


def test_a_suppression_of_a_rule_that_is_left_out_is_not_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("test_train.py").write_text(LOOP.format("  # mpguard: ignore[MPG203]"), encoding="utf-8")
    main(["lint", "--no-cache", "--select", "MPG0,MPG2", "--format", "concise", "."])
    assert "MPG" not in capsys.readouterr().out


MEASURES = """\
import time
import torch

def run(model, optimizer, steps):
    scaler = torch.amp.GradScaler("cuda")
    start = {clock}
    for _ in {steps}:
        x = {batch}
        with torch.autocast("cuda", torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        optimizer.step()
    {end}
    print(f"{{seconds / steps}} s per step, step time")
"""
CLOCK = {"clock": "time.perf_counter()", "end": "seconds = time.perf_counter() - start"}
EVENTS = {
    "clock": "torch.cuda.Event(enable_timing=True)\n    start.record()",
    "end": "end.record()\n    seconds = start.elapsed_time(end)",
}
STEPS = {"steps": "range(steps)"}


@pytest.mark.parametrize(
    ("parts", "reported"),
    [
        ({**CLOCK, **STEPS, "batch": "torch.rand(8, 64)"}, 0),
        ({**EVENTS, **STEPS, "batch": "torch.randn(8, 64, device='cuda')"}, 0),
        ({**CLOCK, **STEPS, "batch": "torch.tensor(read())"}, 1),
        ({**CLOCK, **STEPS, "batch": "next(loader) + torch.randn(8)"}, 1),  # a training that also prints its speed
        ({**CLOCK, "steps": "loader", "batch": "_ + torch.rand(8, 64)"}, 1),
        ({**CLOCK, **STEPS, "batch": "torch.rand(8, 64)", "end": "seconds = 1"}, 1),  # nothing is measured
    ],
)
def test_steps_on_noise_whose_time_is_measured_train_nothing(
    parts: dict[str, str], reported: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(MEASURES.format(**parts), encoding="utf-8")
    main(["lint", "--no-cache", "--select", "MPG203", "--format", "concise", "."])
    assert capsys.readouterr().out.count(" MPG203 ") == reported


MEMORY = """\
import torch
from data import get_batch

def peak(model):
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in {steps}:
        with torch.autocast("cuda", torch.float16):
            loss = model(get_batch()).sum()
        loss.backward()
        optimizer.step()
    {end}
    return torch.cuda.max_memory_allocated()
"""


@pytest.mark.parametrize(
    ("parts", "reported"),
    [
        ({"steps": "range(3)", "end": "del optimizer"}, 0),
        ({"steps": "range(5000)", "end": "del optimizer"}, 1),  # a training that also prints its memory
        ({"steps": "range(3)", "end": "torch.save(model, 'model.pt')"}, 1),
        ({"steps": "loader", "end": "del optimizer"}, 1),
    ],
)
def test_a_few_steps_whose_memory_is_measured_train_nothing(
    parts: dict[str, str], reported: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(MEMORY.format(**parts), encoding="utf-8")
    main(["lint", "--no-cache", "--select", "MPG201", "--format", "concise", "."])
    assert capsys.readouterr().out.count(" MPG201 ") == reported


def test_a_suppression_in_what_only_measures_is_not_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = MEASURES.format(**CLOCK, **STEPS, batch="torch.rand(8, 64)")
    text = text.replace("optimizer.step()", "optimizer.step()  # mpguard: ignore[MPG203]")
    Path("train.py").write_text(text, encoding="utf-8")
    main(["lint", "--no-cache", "--select", "MPG0,MPG2", "--format", "concise", "."])
    assert "MPG" not in capsys.readouterr().out


def test_rules_about_interfaces_report_tests_too() -> None:
    reported = {code for code, rule in rules(own_only=True).items() if issubclass(rule, Rule) and rule.in_tests}
    assert {"MPG302", "MPG406", "MPG513"} <= reported and not {"MPG101", "MPG201", "MPG401"} & reported
