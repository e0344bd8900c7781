"""Completion, asked of a real shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpguard.cli import COMMANDS
from mpguard.lint.report import FORMATS
from mpguard.lint.rule import rules


@pytest.fixture(scope="module")
def script() -> str:
    command = [sys.executable, "-m", "mpguard", "completion"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def completed(script: str, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    ask = f'COMP_WORDS=("$@"); COMP_CWORD={len(words) - 1}; _mpguard; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "--norc", "-uc", f"{script}\n{ask}", "bash", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_commands_options_values_and_codes(script: str) -> None:
    assert completed(script, "mpguard", "") == set(COMMANDS)
    assert completed(script, "mpguard", "li") == {"lint"}
    assert completed(script, "mpguard", "lint", "--out") == {"--output-file"}
    assert {"--fix", "--diff-from", "-j"} <= completed(script, "mpguard", "lint", "train.py", "-")
    assert completed(script, "mpguard", "lint", "--format", "") == set(FORMATS)
    assert completed(script, "mpguard", "rule", "--format", "j") == {"json"}
    assert completed(script, "mpguard", "rule", "") == set(rules())
    assert completed(script, "mpguard", "lint", "--select", "MPG80") == {c for c in rules() if c.startswith("MPG80")}
    assert completed(script, "mpguard", "hook", "un") == {"uninstall"}


def test_what_is_not_known_is_left_to_the_names_of_files(script: str, tmp_path: Path) -> None:
    assert completed(script, "mpguard", "lint", "tr") == set()
    assert completed(script, "mpguard", "lint", "--config", "m") == set()
    assert completed(script, "mpguard", "nonsense", "-") == set()
    assert "complete -o default " in script
