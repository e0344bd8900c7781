"""The hook, run by the real pre-commit in a git repository of somebody else's. Needs a package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
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
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_hook_in_a_strangers_repository(tmp_path: Path) -> None:
    hooks = tmp_path / "mpguard"  # what would be cloned from the web: this working tree, committed
    hooks.mkdir()
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, hooks / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, hooks / name)
    git(hooks, "init", "-q")
    git(hooks, "add", ".")
    git(hooks, "commit", "-qm", "all")

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    git(theirs, "init", "-q")
    hook = {"id": "mpguard", "args": ["--format", "concise", "--config", "mp.yaml"]}
    config = {"repos": [{"repo": str(hooks), "rev": git(hooks, "rev-parse", "HEAD"), "hooks": [hook]}]}
    (theirs / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    (theirs / "mp.yaml").write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    (theirs / "chart.yaml").write_text("{{ a template }}\n")
    (theirs / "train.py").write_text(TRAIN)
    (theirs / "clean.py").write_text("print(1)\n")

    def pre_commit() -> subprocess.CompletedProcess[str]:
        git(theirs, "add", ".")
        environment = {**os.environ, "PRE_COMMIT_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--color", "never"]
        return subprocess.run(command, cwd=theirs, capture_output=True, text=True, timeout=400, env=environment)

    ran = pre_commit()
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "train.py:6:19: MPG101" in ran.stdout
    assert "Found 1 problem in 1 of 3 files" in ran.stdout, "one process had all files; YAML of others is passed over"
    (theirs / "train.py").write_text(TRAIN.replace(".half()", ""))
    ran = pre_commit()
    assert ran.returncode == 0, ran.stdout + ran.stderr
