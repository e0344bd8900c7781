"""The completion scripts in real shells; a shell that is not installed is skipped."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from limits import seconds

from mpguard.cli import COMMANDS
from mpguard.lint.formats.terminal import FORMATS
from mpguard.lint.model.rule import rules


def printed(*shell: str) -> str:
    command = [sys.executable, "-m", "mpguard", "completion", *shell]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds(60), check=True).stdout


@pytest.fixture(scope="module")
def script() -> str:
    return printed()


def completed(script: str, *words: str) -> set[str]:
    """Return what the registered function of bash offers for the last of the words."""
    call = f"""
        registered=($(complete -p mpguard)) COMP_WORDS=("$@") COMP_CWORD={len(words) - 1}
        "${{registered[-2]}}"
        printf "%s\\n" "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-uc", f"{script}\n{call}", "bash", *words],
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_options_values_and_codes(script: str) -> None:
    assert completed(script, "mpguard", "") == set(COMMANDS)
    assert completed(script, "mpguard", "li") == {"lint"}
    assert completed(script, "mpguard", "--v") == {"--version"}
    assert completed(script, "mpguard", "lint", "--out") == {"--output-file"}
    assert {"--fix", "--diff-from", "-j"} <= completed(script, "mpguard", "lint", "train.py", "-")
    assert completed(script, "mpguard", "lint", "--format", "") == set(FORMATS)
    assert completed(script, "mpguard", "rule", "--format", "j") == {"json"}
    assert completed(script, "mpguard", "rule", "") == {*rules(), *(rule.name for rule in rules().values())}
    assert completed(script, "mpguard", "rule", "missing-g") == {"missing-grad-scaler"}
    assert completed(script, "mpguard", "rule", "MPG201", "missing-g") == {"missing-grad-scaler"}
    assert completed(script, "mpguard", "lint", "--select", "MPG80") == {c for c in rules() if c.startswith("MPG80")}
    assert completed(script, "mpguard", "lint", "--gpu", "h1") == {"h100"}
    assert completed(script, "mpguard", "hook", "un") == {"uninstall"}
    assert completed(script, "mpguard", "init", "bf16_m") == {"bf16_mixed"}
    assert completed(script, "mpguard", "init", "bf16_mixed", "--strategy", "fsdp") == {"fsdp1", "fsdp2"}
    assert completed(script, "mpguard", "recipes", "--for", "fsdp") == {"fsdp1", "fsdp2"}
    assert "deepspeed-zero3" in completed(script, "mpguard", "recipes", "fp32", "--strategy", "")


def test_bash_completes_lists_and_values_after_an_equals_sign(script: str) -> None:
    assert completed(script, "mpguard", "lint", "--select", "MPG1,MPG801,MPG86") == {
        f"MPG1,MPG801,{code}" for code in rules() if code.startswith("MPG86")
    }
    for words in (["--format", "="], ["--format", "=", ""]):
        assert completed(script, "mpguard", "lint", *words) == set(FORMATS), words
    assert completed(script, "mpguard", "lint", "--format", "=", "js") == {"json"}
    assert completed(script, "mpguard", "lint", "--format", "=", "json", "--out") == {"--output-file"}
    assert completed(script, "mpguard", "lint", "--ignore", "=", "MPG1,MPG302") == {"MPG1,MPG302"}
    assert completed(script, "mpguard", "lint", "--ignore", "=", "MPG1,MPG3021") == set()


def test_bash_completes_files_elsewhere(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert completed(script, "mpguard", "lint", "tr") == {"train.py"}
    assert completed(script, "mpguard", "lint", "other.py", "tr") == {"train.py"}
    assert completed(script, "mpguard", "lint", "--config", "tr") == {"train.py"}
    assert completed(script, "mpguard", "lint", "--config", "=", "tr") == {"train.py"}
    assert completed(script, "mpguard", "apply", "bf16_mixed", "tr") == {"train.py"}
    assert completed(script, "mpguard", "launch", "--config", "mp.yaml", "tr") == {"train.py"}
    assert completed(script, "mpguard", "lint", "m") == set()
    assert completed(script, "mpguard", "nonsense", "--o") == set()
    assert "complete -o default " in script, "an argument that mpguard does not know may be a file"


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(tmp_path: Path) -> None:
    script = tmp_path / "mpguard.fish"
    script.write_text(printed("fish"))
    (tmp_path / "train.py").touch()

    def offered(line: str) -> dict[str, str]:
        ask = f"source {script}; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", ask],
            capture_output=True,
            text=True,
            timeout=seconds(60),
            check=True,
            cwd=tmp_path,
        )
        assert done.stderr == ""
        return dict([*each.split("\t"), ""][:2] for each in done.stdout.splitlines())

    assert offered("mpguard ") == COMMANDS
    assert list(offered("mpguard lint --output")) == ["--output-file"]
    assert offered("mpguard lint --output")["--output-file"].startswith("write the report")
    assert set(offered("mpguard lint --format ")) == set(FORMATS)
    codes = {c for c in rules() if c.startswith("MPG80")}
    assert set(offered("mpguard rule MPG80")) == codes
    assert set(offered("mpguard lint --select MPG1,MPG80")) == {f"MPG1,{code}" for code in codes}
    assert {each.rpartition("=")[2] for each in offered("mpguard lint --format=j")} == {"json", "junit"}
    assert "bf16_mixed" in offered("mpguard apply bf16_m") and "train.py" in offered("mpguard apply bf16_mixed tr")
    assert set(offered("mpguard init bf16_mixed --strategy fsdp")) == {"fsdp1", "fsdp2"}
    for line in ("lint tr", "lint other.py tr", "lint --config tr", "launch --config mp.yaml tr"):
        assert "train.py" in offered(f"mpguard {line}"), line
    assert {each.rpartition("=")[2] for each in offered("mpguard lint --config=tr")} == {"train.py"}


class Zsh:
    """An interactive zsh on a terminal of its own, as zsh completes only there."""

    def __init__(self, folder: Path) -> None:
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": "> "})

    def type(self, keys: str, until: str) -> bool:
        """Type keys, and return True once the terminal shows a text."""
        os.write(self.terminal, keys.encode())
        shown, deadline = "", time.monotonic() + seconds(60)
        while until not in shown and time.monotonic() < deadline:
            if select.select([self.terminal], [], [], 0.1)[0]:
                shown += os.read(self.terminal, 65536).decode()
        return until in shown

    def clear_line(self) -> None:
        os.write(self.terminal, b"\x15")

    def close(self) -> None:
        os.write(self.terminal, b"\x04")
        os.close(self.terminal)
        os.waitpid(self.process, 0)


@pytest.fixture
def zsh(tmp_path: Path) -> Iterator[Zsh]:
    (tmp_path / "functions").mkdir()
    (tmp_path / "functions" / "_mpguard").write_text(printed("zsh"))
    (tmp_path / "train.py").touch()
    shell = Zsh(tmp_path)
    yield shell
    shell.close()


def test_the_zsh_script_has_what_shtab_leaves_out() -> None:
    """`test_zsh` proves the same where zsh is installed."""
    script = printed("zsh")
    assert "== (eval|file) ]]" in script, "for `source` and ~/.zshrc"
    assert '"*:files and folders' in script and "(*):" not in script, "for a second argument"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    "setup",
    [
        "autoload -Uz compinit && compinit -u -D && source functions/_mpguard",
        "fpath=($PWD/functions $fpath) && autoload -Uz compinit && compinit -u -D",
    ],
    ids=["sourced", "autoloaded"],
)
def test_zsh(zsh: Zsh, setup: str) -> None:
    assert zsh.type(f"{setup} && echo $((40 + 2))\n", "42")
    for keys, completed in (
        ("mpguard compl", "mpguard completion"),
        ("mpguard rule --format j", "--format json"),
        ("mpguard rule MPG101 missing-gr", "MPG101 missing-grad-scaler"),
        ("mpguard lint --outp", "--output-file"),
        ("mpguard lint --format=js", "--format=json"),
        ("mpguard lint --select MPG201,MPG7", "--select MPG201,MPG70"),
        ("mpguard lint --select=MPG1,MPG70", "MPG704"),
        ("mpguard init bf16_mi", "bf16_mixed"),
        ("mpguard init fp32 --strategy deepspeed-z", "--strategy deepspeed-zero"),
        ("mpguard lint tr", "train.py"),
        ("mpguard lint other.py tr", "other.py train.py"),
        ("mpguard lint --config tr", "--config train.py"),
        ("mpguard apply bf16_mixed tr", "bf16_mixed train.py"),
        ("mpguard launch tr", "launch train.py"),
    ):
        assert zsh.type(f"{keys}\t", completed), keys
        zsh.clear_line()


def test_only_this_command_imports_the_completion_library() -> None:
    code = """if True:
        import sys
        from mpguard.cli import main
        main(["--help"]), main(["rule", "MPG201"]), main(["completion", "--help"])
        assert "shtab" not in sys.modules
        main(["completion"])
        assert "shtab" in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=seconds(60), check=True)
