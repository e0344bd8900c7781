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
