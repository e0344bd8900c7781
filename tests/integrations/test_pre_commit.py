"""The hook, run by the real pre-commit in another project's repository. Needs a package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from limits import seconds
from paths import REPOSITORY

pytest.importorskip("pre_commit", reason="the real pre-commit runs here")

ROOT = REPOSITORY
PACKAGED = ("pyproject.toml", "README.md", "LICENSE", ".pre-commit-hooks.yaml", "mpguard", "plugins")

TRAIN = """\
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = (model(x.half()) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
"""


def git(folder: Path, *arguments: str) -> str:
    identity = (
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "commit.gpgsign=false",
    )
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=seconds(60)
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What would be cloned from the web: this working tree, committed."""
    hooks = tmp_path_factory.mktemp("hooks") / "mpguard"
    hooks.mkdir()
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, hooks / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, hooks / name)
    git(hooks, "init", "-q")
    git(hooks, "add", ".")
    git(hooks, "commit", "-qm", "all")
    return hooks


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**os.environ, "PRE_COMMIT_HOME": str(tmp_path_factory.mktemp("cache")), "PRE_COMMIT_COLOR": "never"}


def strangers_repository(folder: Path, hooks: Path, hook: dict[str, Any]) -> Path:
    theirs = folder / "theirs"
    theirs.mkdir()
    git(theirs, "init", "-q")
    config = {"repos": [{"repo": str(hooks), "rev": git(hooks, "rev-parse", "HEAD"), "hooks": [hook]}]}
    (theirs / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    return theirs


def test_hook_in_a_strangers_repository(tmp_path: Path, hooks: Path, environment: dict[str, str]) -> None:
    hook = {"id": "mpguard", "args": ["--format", "concise", "--config", "mp.yaml"]}
    theirs = strangers_repository(tmp_path, hooks, hook)
    (theirs / "mp.yaml").write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    (theirs / "chart.yaml").write_text("{{ a template }}\n")
    (theirs / "train.py").write_text(TRAIN)
    (theirs / "clean.py").write_text("print(1)\n")

    def pre_commit() -> subprocess.CompletedProcess[str]:
        git(theirs, "add", ".")
        command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--color", "never"]
        return subprocess.run(
            command, cwd=theirs, capture_output=True, text=True, timeout=seconds(400), env=environment
        )

    ran = pre_commit()
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "train.py:6:19: MPG101" in ran.stdout
    assert "Found 1 problem in 1 of 3 files" in ran.stdout, "one process had all files; YAML of others is passed over"
    (theirs / "train.py").write_text(TRAIN.replace(".half()", ""))
    ran = pre_commit()
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_fixing_hook_refuses_a_commit_mends_and_lets_the_next_one_pass(
    tmp_path: Path, hooks: Path, environment: dict[str, str]
) -> None:
    theirs = strangers_repository(tmp_path, hooks, {"id": "mpguard-fix"})
    wizard = "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  amax_history_length: 16\n"
    (theirs / "mp.yaml").write_text(wizard)
    for number in range(40):  # so many that they would be split among processes
        (theirs / f"clean{number}.py").write_text("print(1)\n")
    install = [sys.executable, "-m", "pre_commit", "install"]
    subprocess.run(install, cwd=theirs, capture_output=True, timeout=seconds(60), check=True, env=environment)

    def commit() -> subprocess.CompletedProcess[str]:
        git(theirs, "add", ".")
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-m", "x"]
        return subprocess.run(
            command, cwd=theirs, capture_output=True, text=True, timeout=seconds(400), env=environment
        )

    refused = commit()
    assert refused.returncode == 1, refused.stdout + refused.stderr
    output = refused.stdout + refused.stderr
    assert "Fixed 1 problem in 1 file" in output and "files were modified by this hook" in output
    assert output.count("problem") == 2, "one process had all files"
    assert (theirs / "mp.yaml").read_text() == wizard.replace("length", "len")
    passed = commit()
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert git(theirs, "show", "HEAD:mp.yaml").endswith("amax_history_len: 16")


def test_all_hooks_run_in_one_process_and_read_the_same_files() -> None:
    declared = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert [hook["id"] for hook in declared] == ["mpguard", "mpguard-fix"]
    assert all(hook["require_serial"] is True for hook in declared)
    assert len({str(hook["types_or"]) for hook in declared}) == 1
