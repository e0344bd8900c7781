"""Projects that mean no good, or are just odd: linted as a user would, in a process of its own that has to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpguard.cli import main

#: A finding of MPG302, which has a safe fix.
TRAIN = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
MENDED = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'
CONFIG = "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  amax_history_length: 16\n"
FORMATS = ("full", "concise", "json", "sarif", "github", "gitlab", "junit")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lint(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`mpguard lint` in a process; it fails where that takes longer than a minute."""
    command = [sys.executable, "-m", "mpguard", "lint", "--format", "concise", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)
    assert "Traceback" not in done.stderr, done.stderr
    return done


# -- files that are none ------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
def test_fifos_where_files_are_looked_for() -> None:
    """Nobody writes into them: whoever opened one as a file would wait for ever."""
    for name in (
        ".gitignore", "requirements.txt", "requirements-dev.txt", "setup.py", "setup.cfg", "mp.yaml", "ds_config.json",
        "README.md", "run.sh", "Makefile", "helper.py", "other.py", "page.ipynb",
    ):  # fmt: skip
        os.mkfifo(name)
    Path("train.py").write_text(f"from helper import scale\nfrom other import *\n{TRAIN}scale(torch)\n")
    Path("use.sh").write_text("accelerate launch --config_file mp.yaml train.py\n")
    done = lint(".")
    assert done.returncode == 1, done.stderr
    assert "train.py:4:10: MPG302" in done.stdout


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
@pytest.mark.parametrize("name", ["pyproject.toml", "mpguard.toml"])
def test_settings_that_are_a_fifo(name: str) -> None:
    os.mkfifo(name)
    Path("train.py").write_text(TRAIN)
    done = lint("train.py")
    assert done.returncode == 2
    assert f"{name}: cannot be read" in done.stderr and "is a FIFO" in done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
def test_a_config_that_is_a_fifo_or_a_device() -> None:
    os.mkfifo("mp.yaml")
    Path("train.py").write_text(TRAIN)
    for name in ("mp.yaml", "/dev/zero"):
        done = lint("--config", name, "train.py")
        assert done.returncode == 2
        assert f"{name}: cannot be read" in done.stderr


def test_links_that_loop() -> None:
    Path("train.py").write_text(TRAIN)
    Path("loop.py").symlink_to("loop.py")
    Path("ping.py").symlink_to("pong.py")
    Path("pong.py").symlink_to("ping.py")
    Path("down").symlink_to(".")
    Path("folder").mkdir()
    Path("folder/up").symlink_to("..")
    Path("mp.yaml").symlink_to("mp.yaml")
    Path("pyproject.toml").symlink_to("/nowhere/pyproject.toml")
    Path("requirements.txt").symlink_to("requirements.txt")
    Path("use.sh").write_text("accelerate launch --config_file mp.yaml train.py\n")
    done = lint(".")
    assert done.returncode == 1
    assert done.stdout.count("MPG302") == 1, "each file once"
    assert "loop.py:1:1: MPG000 the file is a broken link" in done.stdout


# -- nothing of the project is run ----------------------------------------------------------------------

#: Modules that mpguard, its libraries or Python's own would import, or a tool beside it run.
SHADOWS = (
    "torch", "yaml", "libcst", "rich", "pathspec", "accelerate", "sitecustomize", "usercustomize", "conftest", "setup",
    "argparse", "dataclasses", "enum", "json", "random", "tokenize", "tomllib", "typing", "typing_extensions",
    "mpguard_plugins", "mpguard_hook",
)  # fmt: skip


@pytest.mark.parametrize("command", [["-m", "mpguard"], ["-Bm", "mpguard"], ["mpguard"]], ids=" ".join)
def test_nothing_of_the_project_is_imported(command: list[str]) -> None:
    for name in (*SHADOWS, *(["mpguard"] if command == ["mpguard"] else [])):
        Path(f"{name}.py").write_text(f"open('{name}.run', 'w').close()\nraise SystemExit('run: {name}')\n")
    Path("train.py").write_text(f"import conftest, yaml\nfrom torch import *\n{TRAIN}")
    Path("mp.yaml").write_text(CONFIG)
    Path("theirs.egg-info").mkdir()
    Path("theirs.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    Path("theirs.egg-info/entry_points.txt").write_text("[mpguard.rules]\ntheirs = conftest\n")
    program = [sys.executable] if command[0] != "mpguard" else []
    script = str(Path(sys.executable).with_name("mpguard"))
    done = subprocess.run(
        [*program, *(script if part == "mpguard" and not program else part for part in command), "lint",
         "--format", "concise", "--select", "ALL", "."],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "MPG302" in done.stdout and "run: " not in done.stdout + done.stderr
    assert not list(Path().glob("*.run"))


def test_the_test_above_can_fail() -> None:
    Path("yaml.py").write_text("open('yaml.run', 'w').close()\n")
    subprocess.run([sys.executable, "-c", "import yaml"], check=True)
    assert Path("yaml.run").exists()


def test_isolated_takes_no_settings() -> None:
    Path("pyproject.toml").write_text("[tool.mpguard]\nignore = ['ALL']\nconfigs = ['gone.yaml']\n")
    Path("train.py").write_text(TRAIN)
    assert lint(".").returncode == 2
    done = lint("--isolated", ".")
    assert done.returncode == 1
    assert "MPG302" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 100_000 + "]" * 100_000,
        "x = " + "{a=" * 5_000 + "1" + "}" * 5_000,
        "x = " + "9" * 10_000,
        "tool = 3\n[other]\nmpguard = 1\n",
        "[tool]\nmpguard = 'x'\n",
        "[tool.mpguard]\nselect = 'MPG\\u001b[31m'\n",
        "[tool.mpguard]\nselect = ['MPG\\u001b[31m']\n",
        "[tool.mpguard]\nexclude = ['(((((((((((((((((((((((((((((((((', '**/**/**/**/**/**/**/**/**/**/x']\n",
        "[tool.mpguard\n",
        "\x00",
    ],
    ids=["lists", "tables", "digits", "no table", "text", "escape", "escape in a list", "patterns", "broken", "nul"],
)
def test_hostile_settings(text: str) -> None:
    Path("pyproject.toml").write_text("# mpguard\n" + text)
    Path("a/b/c/d/e/f/g/h/i/j/k/l/m/n").mkdir(parents=True)
    Path("a/b/c/d/e/f/g/h/i/j/k/l/m/n/train.py").write_text(TRAIN)
    done = lint(".")
    assert done.returncode in (1, 2)
    assert "\x1b" not in done.stdout + done.stderr
    if done.returncode == 2:
        assert "pyproject.toml" in done.stderr
    else:
        assert "MPG302" in done.stdout
