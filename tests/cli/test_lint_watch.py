"""`mpguard lint --watch`, as a process that is started, fed with changes and ended with Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from limits import seconds

from mpguard.cli import main
from mpguard.cli.lint_watch import is_folder, matters

OLD = "import torch\n\nscaler = torch.cuda.amp.GradScaler()\n"
NEW = OLD.replace("torch.cuda.amp.GradScaler()", 'torch.amp.GradScaler("cuda")')
TIMEOUT = seconds(60)


class Watching:
    """A running watch. `output` is all that it has printed, to both streams in order."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "mpguard", "lint", "--watch", "--format", "concise", *arguments]
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.output = ""
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def next(self, until: str) -> str:
        """What is printed from here on, up to a line that holds some text."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            new = self.output[self._seen :]
            if until in new and new.endswith("\n"):
                self._seen += len(new)
                return new
            assert self.process.poll() is None, self.output
            time.sleep(0.02)
        raise AssertionError(f"{until!r} was not printed: {self.output}")

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)
        return status


@contextlib.contextmanager
def watching(folder: Path, *arguments: str) -> Iterator[Watching]:
    started = Watching(folder, *arguments)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)


def test_it_reports_again_what_changed_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "src").mkdir()
    train, settings = tmp_path / "src" / "train.py", tmp_path / "pyproject.toml"
    train.write_text(OLD)
    with watching(tmp_path, "src", "--ignore", "MPG202") as watch:
        assert "src/train.py:3:10: MPG302" in watch.next("watching for changes; press Ctrl-C to stop")
        train.write_text(NEW)
        assert "No problems in 1 file.\n" in watch.next("src/train.py changed; watching for changes")
        train.write_text(OLD)
        assert "src/train.py:3:10: MPG302" in watch.next("changed; watching for changes")
        settings.write_text('[tool.mpguard]\nignroe = ["MPG302"]\n')
        assert "did you mean `ignore`?" in watch.next("pyproject.toml changed; watching for changes"), "and it goes on"
        settings.write_text('[tool.mpguard]\nignore = ["MPG302"]\n')
        assert "No problems in 1 file.\n" in watch.next("pyproject.toml changed; watching for changes")
        (tmp_path / "src" / "other.py").write_text(OLD)
        assert "No problems in 2 files.\n" in watch.next("src/other.py changed; watching for changes")
        train.unlink()
        assert "No problems in 1 file.\n" in watch.next("src/train.py changed; watching for changes")
        assert watch.interrupt() == 0
        assert "Traceback" not in watch.output
        assert "\x1b" not in watch.output, "only a terminal is cleared"


def test_files_that_nothing_rests_on_start_nothing(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "b.yaml",
        "pyproject.toml",
        "requirements-dev.txt",
        "Makefile",
        "c/d.ipynb",
        "run.sh",
        ".gitignore",
    ):
        assert matters(str(tmp_path / name), [tmp_path]), name
    for name in (
        ".git/a.py",
        "c/.venv/b.py",
        ".a.py.swp",
        "a.py~",
        "4913",
        ".#a.py",
        "log.txt",
        ".mpguard_cache/x.json",
        "LICENSE",
    ):
        assert not matters(str(tmp_path / name), [tmp_path]), name
    assert matters(str(tmp_path / "venv" / "a.py"), [tmp_path / "venv"]), "the project itself may lie anywhere"


def test_a_folder_that_comes_or_goes_as_a_whole(tmp_path: Path) -> None:
    """The files in it get no events of their own."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(OLD)
    with watching(tmp_path) as watch:
        assert "src/train.py:3:10: MPG302" in watch.next("watching for changes; press Ctrl-C to stop")
        (tmp_path / "src").rename(tmp_path / "lib")
        assert "lib/train.py:3:10: MPG302" in watch.next("changed; watching for changes")
        (tmp_path / ".gitignore").write_text("lib/\n")
        assert "No problems in 0 files" in watch.next(".gitignore changed; watching for changes")
        assert watch.interrupt() == 0
    for name, expected in (("lib", True), ("gone", True), ("4913", False), ("gone.txt", False), ("venv", False)):
        assert is_folder(str(tmp_path / name), [tmp_path]) is expected, name
    (tmp_path / "empty").mkdir()
    (tmp_path / "LICENSE").touch()
    assert not is_folder(str(tmp_path / "empty"), [tmp_path]) and not is_folder(str(tmp_path / "LICENSE"), [tmp_path])


def test_on_a_terminal_the_screen_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OLD)
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "mpguard", "lint", "--watch", "train.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave, env={**environment, "TERM": "xterm"},
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + TIMEOUT
    try:
        while b"Ctrl-C to stop" not in shown and time.monotonic() < deadline:
            if select.select([master], [], [], 1)[0]:
                shown += os.read(master, 65536)
        assert shown.startswith(b"\x1b[2J") and b"MPG302" in shown
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        os.close(master)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fix"], "--fix writes or prints once"),
        (["--diff"], "--diff writes or prints once"),
        (["--add-noqa"], "--add-noqa writes or prints once"),
        (["--write-baseline", "b.json"], "--write-baseline writes or prints once"),
        (["--output-file", "x.txt"], "--output-file takes one report"),
        (["--format", "json"], "--format json is a single document; use full or concise"),
        (["-"], "`-` is stdin"),
    ],
)
def test_what_makes_no_sense_with_it_is_refused(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lint", "--watch", *more]) == 2
    assert message in capsys.readouterr().err


def test_what_is_wrong_from_the_start_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(OLD)
    assert main(["lint", "--watch", "--select", "MPG999"]) == 2
    assert "there is no rule `MPG999`" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    assert main(["lint", "--watch"]) == 2
    assert "pip install 'mpguard[watch]'" in capsys.readouterr().err
