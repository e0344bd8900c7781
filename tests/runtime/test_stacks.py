from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import pytest
from limits import seconds
from processes import mp_yaml, torchrun, transcript

from mpguard.runtime import stacks


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(stacks, "POLL", 0.02)
    monkeypatch.setattr(stacks, "STANDSTILL", 0.2)
    monkeypatch.setattr(stacks, "rank", lambda: 3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return []


def _wait_until(condition: object, reported: list[str]) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds(10)
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition(), reported


def test_a_standstill_is_reported_once_with_the_line_of_the_script(reported: list[str], tmp_path: Path) -> None:
    ended = threading.Event()
    waits = threading.Event()

    def run() -> None:
        stacks.report_standstill(ended.is_set, lambda: 0, reported.append)
        waits.wait(seconds(10))

    thread = threading.Thread(target=run)
    thread.start()
    _wait_until(lambda: reported, reported)
    time.sleep(0.5)
    waits.set()
    thread.join()
    ended.set()
    [line] = reported
    [file] = tmp_path.iterdir()
    assert line.startswith("mpguard: rank 3 has been at one place for 0 s, before its first step was proven: ")
    assert "test_stacks.py:" in line and "(`waits.wait(seconds(10))`), in `wait` of threading." in line
    assert line.endswith(f"the stacks of all its threads are in {file}") and "in run" in file.read_text()


def test_progress_and_the_end_of_the_watch_are_no_standstill(reported: list[str]) -> None:
    is_over, moves = threading.Event(), threading.Event()

    def run() -> None:
        stacks.report_standstill(is_over.is_set, lambda: object() if moves.is_set() else 0, reported.append)
        time.sleep(0.8)

    for event in (moves, is_over):
        event.set()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        event.clear()
    assert reported == []


SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from mpguard.runtime import stacks
stacks.POLL, stacks.STANDSTILL = 0.1, 1.5
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
until = time.monotonic() + 6
while dist.get_rank() == 0 and time.monotonic() < until: sum(each**0.5 for each in range(10_000))
dist.barrier()
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16): loss = model(torch.randn(4, 8)).float().sum()
    loss.backward()
    for each in model.parameters(): dist.all_reduce(each.grad, dist.ReduceOp.SUM)
    optimizer.step(); optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_a_rank_that_waits_for_another_says_where(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    (tmp_path / "train.py").write_text(SCRIPT)
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    ended = torchrun("-m", "mpguard.run", "--config", config, "train.py", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert ended.returncode == 0, transcript(ended)
    [line] = [line for line in ended.stderr.splitlines() if "rank 1 has been at one place" in line]
    assert "train.py:11 (`dist.barrier()`), in `barrier` of torch.distributed" in line, transcript(ended)
    assert "in force at steps 1-2" in ended.stderr, transcript(ended)
