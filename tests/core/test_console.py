"""Lines on a terminal of 80 columns, and the same ones in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from limits import seconds

from mpguard.cli import main
from mpguard.core.console import Line, folded, print_line, print_message, write_lines


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


def test_lines_break_at_spaces_and_keep_their_styles() -> None:
    line: Line = [("run:", "bold"), (" the loss is far", "red"), (" from the baseline", "")]
    parts = list(folded(line, 4, 16))
    assert [text_of(part) for part in parts] == ["run: the loss is", "    far from the", "    baseline"]
    assert [style for text, style in parts[0] if text.strip()] == ["bold", "red"]
    assert [text_of(part) for part in folded(line, 4, None)] == [text_of(line)]
    assert text_of(next(iter(folded([("a_word_without_spaces", "")], 4, 8)))) == "a_word_without_spaces"


def on_a_terminal(*words: str, folder: Path) -> list[str]:
    """Return what mpguard prints on a terminal of 80 columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "mpguard", *words], stdin=follower, stdout=follower, stderr=follower, cwd=folder,
        env={**clean, "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    text = b""
    while True:
        try:
            text += os.read(leader, 4096)
        except OSError:  # the other side is closed
            break
    process.wait(timeout=seconds(60))
    os.close(leader)
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).replace("\r\n", "\n").splitlines()


def test_tables_fit_on_a_terminal(tmp_path: Path) -> None:
    for name, factor in (("base", 1.0), ("other", 1.02)):
        rows = "".join(f"{step},{factor * (2 + 1 / step)}\n" for step in range(1, 200))
        (tmp_path / f"{name}.csv").write_text("step,loss\n" + rows, encoding="utf-8")
    doctor = on_a_terminal("doctor", "--fast", folder=tmp_path)
    compare = on_a_terminal("compare", "other.csv", "--baseline", "base.csv", folder=tmp_path)
    for lines in (doctor, compare):
        assert len(lines) > 4 and all(len(line) <= 80 for line in lines), "\n".join(lines)
    assert any(line.startswith("bf16_mixed ") for line in doctor), "\n".join(doctor)


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"LANG": "C"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),
        ({"LC_ALL": "POSIX", "LANG": "de_DE.UTF-8"}, False),
        ({}, True),
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, True),
    ],
)
def test_the_locale_c_gets_plain_characters(
    environment: dict[str, str], shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LANG", "LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    write_lines([[("±0.5 %, 2 ", ""), ("─ é", "")]])
    assert capsys.readouterr().out == ("±0.5 %, 2 ─ é\n" if shown else "+-0.5 %, 2 - é\n")


@pytest.mark.parametrize("colors", ["", "1"])
@pytest.mark.parametrize(
    "command",
    ["recipes", "recipes bf16_mixed", "estimate llama-3.1-8b --gpus 8", "explain mp.yaml train.py", "lint train.py",
     "rule MPG201", "compare other.csv --baseline base.csv", "apply fp16_mixed mp.yaml --diff", "doctor --fast"],
)  # fmt: skip
def test_all_commands_print_ascii_in_the_locale_c(
    command: str, colors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LANG", "C")
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.setenv("FORCE_COLOR", colors)
    monkeypatch.chdir(tmp_path)
    for name, factor in (("base", 1.0), ("other", 1.02)):
        rows = "".join(f"{step},{factor * (2 + 1 / step)}\n" for step in range(1, 200))
        Path(f"{name}.csv").write_text("step,loss\n" + rows, encoding="utf-8")
    Path("train.py").write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n", encoding="utf-8")
    main(["init", "bf16_mixed", "-o", "mp.yaml"])
    main(command.split())
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert text.count("\n") > 2 and text.isascii(), [line for line in text.splitlines() if not line.isascii()]


def test_lines_and_messages_of_a_run_are_ascii_in_the_locale_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    print_line("mpguard 0.1.0 · recipe bf16_mixed")
    print_message("±0.5 %")
    assert capsys.readouterr().err == "mpguard 0.1.0 - recipe bf16_mixed\nmpguard: +-0.5 %\n"
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    print_line("mpguard 0.1.0 · recipe bf16_mixed")
    assert capsys.readouterr().err == "mpguard 0.1.0 · recipe bf16_mixed\n"
