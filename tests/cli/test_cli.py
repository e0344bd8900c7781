"""The command line as a whole: help, version, exit statuses of what is not one command's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from limits import seconds

import mpguard
from mpguard.cli import COMMANDS, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpguard {mpguard.__version__}\n"


def test_python_m_is_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpguard", "--version"], capture_output=True, text=True, timeout=seconds(60)
    )
    assert (done.returncode, done.stdout) == (0, f"mpguard {mpguard.__version__}\n")


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["help", "rule"]), main(["help"])) == (0, 0)
    out = capsys.readouterr().out
    assert "usage: mpguard rule" in out and "usage: mpguard COMMAND" in out
    assert main(["help", "ruel"]) == 2
    assert "did you mean `rule`" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "message"), [("--nope", "`--nope`"), ("--verzion", "did you mean `--version`")])
def test_an_unknown_option_is_an_error(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 2
    assert message in capsys.readouterr().err


def test_a_link_to_itself_is_not_its_own_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert main(["estimate", str(tmp_path / "loop")]) == 2
    assert main(["compare", str(tmp_path / "loop"), "--baseline", "x"]) == 2
    assert "did you mean" not in capsys.readouterr().err


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["a.py", "--format", "concise", "b.py"],
        ["a.py", "--format", "concise", "--", "b.py"],
        ["--format", "concise", "--", "a.py", "b.py"],
        ["a.py", "b.py", "--format=concise"],
    ],
)
def test_options_may_stand_between_names(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        Path(name).write_text("x = \n")
    assert main(["lint", *arguments]) == 1
    out = capsys.readouterr().out
    assert out.startswith("a.py:1:") and "\nb.py:1:" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lint", "--", "-x", "--fix"], "mpguard: -x: no such file or folder"),
        (["apply", "bf16_mixed", "--", "-x"], "mpguard: -x: "),
        (["lint", "a.py", "--nope", "b.py"], "there is no option `--nope`"),
        (["lint", "--baseline=--"], "`--` is not a valid value for `--baseline`"),
        (["completion", "zsh", "fish"], "unexpected argument `fish`"),
        (["lint", "--select", "--", "a.py"], "--select: expected one argument"),
    ],
)
def test_what_stands_behind_two_dashes_is_no_option(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--help", "--version", "rule --all", "rule MPG201", "completion zsh", "recipes"])
def test_a_reader_that_is_gone_is_no_traceback(arguments: str) -> None:
    command = f"{sys.executable} -m mpguard {arguments} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=seconds(60))
    assert (done.returncode in (0, 2), done.stdout, done.stderr) == (True, "", "")


@pytest.mark.parametrize("arguments", ["--version", "lint a.py", "lint --format json a.py", "lint -", "rule --all"])
def test_streams_that_are_closed_or_full(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()

    def ran(streams: str) -> tuple[int, str]:
        command = ["bash", "-c", f"{sys.executable} -m mpguard {arguments} {streams}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=seconds(60))
        return done.returncode, done.stderr

    assert ran("<&- >&-") == (0, "")
    assert ran("<&- >&- 2>&-") == (0, "")
    if Path("/dev/full").exists():
        assert ran("< /dev/null > /dev/full") == (2, "mpguard: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: mpguard {command}" in out
    assert len(out.splitlines()) > 3


def test_names_of_files_and_arguments_that_are_almost_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mp.yaml").write_text("mixed_precision: bf16\n", encoding="utf-8")
    Path("loop.yaml").symlink_to("loop.yaml")
    for command, said in (
        ("doctor bf16_mxed", "unexpected argument `bf16_mxed`; did you mean `--recipe bf16_mxed`?"),
        ("explain loop.yaml", "loop.yaml: is a link that leads to no file, or to itself"),
        ("apply bf16_mixed mp.yml", "mp.yml: cannot be read: No such file or directory; did you mean `mp.yaml`?"),
    ):
        try:
            status = main(command.split())
        except SystemExit as ended:
            status = int(str(ended.code))
        assert status == 2 and said in capsys.readouterr().err, command
