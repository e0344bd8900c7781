"""The progress bar on a real terminal: only in runs that take more than a second."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from distributions import install
from limits import seconds

#: A rule that takes its time.
SLOW = """
import time
from mpguard.lint.model.rule import Rule

class Slow(Rule):
    '''What it does.'''
    code, name, severity, message = "OUR001", "slow", "error", "of theirs"

    def check(self, facts):
        time.sleep(0.1)
        return iter(())
"""


@pytest.fixture
def slow(tmp_path: Path) -> dict[str, str]:
    """An environment in which each of thirty files takes a tenth of a second."""
    install(tmp_path / "site", SLOW)
    (tmp_path / "work").mkdir()
    for number in range(30):
        (tmp_path / "work" / f"{number}.py").write_text("import torch\n")
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    return {**clean, "PYTHONPATH": str(tmp_path / "site"), "TERM": "xterm", "COLUMNS": "80"}


def on_terminal(folder: Path, environment: dict[str, str], *arguments: str) -> tuple[str, str]:
    """What a run prints: to stdout, a pipe, and to stderr, a terminal."""
    master, slave = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # Linux raises an error when the other end is closed
                return
            if not data:
                return
            shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    command = [sys.executable, "-m", "mpguard", "lint", "--no-cache", *arguments]
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=slave, env=environment, text=True, timeout=seconds(120)
    )
    os.close(slave)
    reader.join(60)
    os.close(master)
    return done.stdout, b"".join(shown).decode()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_long_run_shows_how_far_it_is_and_then_takes_it_away(slow: dict[str, str], tmp_path: Path, jobs: str) -> None:
    out, shown = on_terminal(tmp_path / "work", slow, "-j", jobs)
    assert out == "No problems in 30 files.\n", "the report is what it always is"
    assert "checking" in shown and "/30" in shown and "files" in shown
    assert shown.endswith("\x1b[2K") or "\x1b[?25h" in shown, "the line is cleared, and the cursor is back"


def test_nobody_else_sees_it(slow: dict[str, str], tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert on_terminal(work, slow, "0.py", "1.py")[1] == "", "a short run"
    assert on_terminal(work, {**slow, "CI": "true"}, "-j", "1")[1] == ""
    assert on_terminal(work, {**slow, "TERM": "dumb"}, "-j", "1")[1] == ""
    command = [sys.executable, "-m", "mpguard", "lint", "--no-cache", "-j", "1"]
    done = subprocess.run(command, cwd=work, capture_output=True, env=slow, text=True, timeout=seconds(120))
    assert (done.stdout, done.stderr) == ("No problems in 30 files.\n", "")
