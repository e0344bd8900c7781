"""The command line as a whole: help, version, exit statuses of what is not one command's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mpguard
from mpguard.cli import COMMANDS, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpguard {mpguard.__version__}\n"


def test_python_m_is_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "mpguard", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"mpguard {mpguard.__version__}\n")


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: mpguard COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("typed, meant", [("lnit", "init"), ("lauch", "launch"), ("aply", "apply")])
def test_unknown_command_names_the_near_one(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    assert f"`{meant}`" in capsys.readouterr().err


def test_unknown_leading_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fast", "lint"]) == 2
    assert "--fast" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: mpguard {command}" in out
    assert len(out.splitlines()) > 3
