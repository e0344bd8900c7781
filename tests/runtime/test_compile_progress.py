"""A compilation that takes long is reported while it runs."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from limits import seconds

from mpguard.runtime import compile_progress, stacks
from mpguard.runtime.compile_progress import CompileProgress


def test_lines_while_it_compiles_each_after_twice_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "IDLE", 0.2)
    monkeypatch.setattr(compile_progress, "POLL", 0.02)
    clock = SimpleNamespace(now=0.0)  # its own: on a busy machine the thread that prints may wake up a second late
    monkeypatch.setattr(compile_progress, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    lines: list[str] = []
    progress = CompileProgress(lines.append)
    progress.seconds, progress.graphs = 9.9, 3
    progress.begin()
    clock.now += 0.3
    deadline = time.monotonic() + seconds(20)
    while not lines and time.monotonic() < deadline:
        time.sleep(0.05)
    progress.end()
    assert lines == ["mpguard: compiling for 10 s so far, 3 graphs done; torch keeps them for the next start"]
    progress.seconds = 15.0  # not yet twice as long
    progress.begin()
    clock.now += 0.2
    time.sleep(0.2)
    progress.end()
    assert len(lines) == 1 and progress.graphs == 5


def test_nothing_is_printed_of_a_short_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "IDLE", 0.1)
    monkeypatch.setattr(compile_progress, "POLL", 0.02)
    lines: list[str] = []
    progress = CompileProgress(lines.append)
    progress.begin()
    progress.end()
    assert progress._thread is not None
    progress._thread.join(seconds(20))
    assert not progress._thread.is_alive() and lines == [] and progress.graphs == 1


def test_the_stacks_of_one_long_compilation_are_in_a_file_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(compile_progress, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    monkeypatch.setattr(compile_progress, "POLL", 0.02)
    monkeypatch.setattr(compile_progress, "rank", lambda: 3)
    monkeypatch.setattr(stacks, "rank", lambda: 3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lines: list[str] = []
    progress = CompileProgress(lambda _line: None, lines.append)

    def compile_slowly() -> None:
        clock.now += 61
        deadline = time.monotonic() + seconds(20)
        while not lines and time.monotonic() < deadline:
            time.sleep(0.05)

    for _ in range(2):  # once per process
        progress.begin()
        compile_slowly()
        time.sleep(0.2)
        progress.end()
    clock.now += 10  # the thread ends
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("mpguard-stacks-rank3-") and "in compile_slowly" in file.read_text()
    assert lines == [f"mpguard: rank 3 has compiled one graph for 61 s; the stacks of all its threads are in {file}"]


def test_torch_calls_back() -> None:
    torch = pytest.importorskip("torch", reason="the real library runs here")
    compile_progress.watch(lambda _line: None)
    progress = compile_progress._progress
    assert progress is not None
    before = progress.graphs
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    compile_progress.watch(print)
    assert compile_progress._progress is progress and progress.graphs == before + 1
