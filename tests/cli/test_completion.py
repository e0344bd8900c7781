"""Completion, asked of real shells; those that are not installed are left out."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpguard.cli import COMMANDS
from mpguard.lint.formats.terminal import FORMATS
from mpguard.lint.model.rule import rules


def printed(*shell: str) -> str:
    command = [sys.executable, "-m", "mpguard", "completion", *shell]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def script() -> str:
    return printed()


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
    assert completed(script, "mpguard", "rule", "") == {*rules(), *(rule.name for rule in rules().values())}
    assert completed(script, "mpguard", "rule", "missing-g") == {"missing-grad-scaler"}
    assert completed(script, "mpguard", "lint", "--select", "MPG80") == {c for c in rules() if c.startswith("MPG80")}
    assert completed(script, "mpguard", "hook", "un") == {"uninstall"}
    assert completed(script, "mpguard", "init", "bf16_m") == {"bf16_mixed"}
    assert completed(script, "mpguard", "recipes", "--for", "fsdp") == {"fsdp1", "fsdp2"}


def test_lists_and_values_behind_a_sign(script: str) -> None:
    assert completed(script, "mpguard", "lint", "--select", "MPG1,MPG801,MPG86") == {
        f"MPG1,MPG801,{code}" for code in rules() if code.startswith("MPG86")
    }
    for words in (["--format", "="], ["--format", "=", ""], ["--format="]):
        assert {each.rpartition("=")[2] for each in completed(script, "mpguard", "lint", *words)} == set(FORMATS), words
    assert completed(script, "mpguard", "lint", "--format", "=", "js") == {"json"}
    assert completed(script, "mpguard", "lint", "--format=js") == {"--format=json"}, "as zsh splits"
    assert completed(script, "mpguard", "lint", "--ignore=MPG1,MPG3021") == set()


def test_what_is_not_known_is_left_to_the_names_of_files(script: str, tmp_path: Path) -> None:
    assert completed(script, "mpguard", "lint", "tr") == set()
    assert completed(script, "mpguard", "lint", "--config", "m") == set()
    assert completed(script, "mpguard", "nonsense", "-") == set()
    assert "complete -o default " in script


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(tmp_path: Path) -> None:
    script = tmp_path / "mpguard.fish"
    script.write_text(printed("fish"))
    (tmp_path / "train.py").touch()

    def offered(line: str) -> dict[str, str]:
        ask = f"source {script}; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", ask], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
        )
        assert done.stderr == ""
        return dict([*each.split("\t"), ""][:2] for each in done.stdout.splitlines())

    assert offered("mpguard ") == COMMANDS
    assert offered("mpguard lint --output") == {"--output-file": "write the report there, and only a summary to stderr"}
    assert set(offered("mpguard lint --format ")) == set(FORMATS)
    assert set(offered("mpguard rule MPG80")) == {c for c in rules() if c.startswith("MPG80")}
    codes = {c for c in rules() if c.startswith("MPG80")}
    assert set(offered("mpguard lint --select MPG1,MPG80")) == {f"MPG1,{code}" for code in codes}
    assert {each.rpartition("=")[2] for each in offered("mpguard lint --format=j")} == {"json", "junit"}
    assert "bf16_mixed" in offered("mpguard apply bf16_m") and "train.py" in offered("mpguard apply bf16_mixed tr")
    assert "train.py" in offered("mpguard lint tr")
    assert "train.py" in offered("mpguard lint --config tr")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh(tmp_path: Path) -> None:
    """On a terminal: zsh completes nowhere else."""
    (tmp_path / "mpguard.zsh").write_text(printed("zsh"))
    (tmp_path / "train.py").touch()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": "> "})

    def typed(keys: str, until: str) -> bool:
        os.write(terminal, keys.encode())
        shown, deadline = "", time.monotonic() + 60
        while until not in shown and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536).decode()
        return until in shown

    try:
        assert typed("autoload -Uz compinit && compinit -u -D && source mpguard.zsh && echo $((40 + 2))\n", "42")
        for keys, completed in (
            ("mpguard comp", "mpguard completion"),
            ("mpguard rule --format j", "--format json"),
            ("mpguard lint --outp", "--output-file"),
            ("mpguard lint --format=js", "--format=json"),
            ("mpguard init bf16_mi", "bf16_mixed"),
            ("mpguard lint tr", "train.py"),
        ):
            assert typed(f"{keys}\t", completed), keys
            os.write(terminal, b"\x15")  # away with the line
    finally:
        os.write(terminal, b"\x04")
        os.close(terminal)
        os.waitpid(process, 0)
