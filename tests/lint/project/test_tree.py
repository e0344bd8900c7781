"""The tree of a file: what counts as a project, and which folders of a run do where nothing marks one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpguard.cli import main

NET = """\
import torch


def build():
    return torch.nn.Linear(8, 8).half()
"""
TRAIN = """\
import torch
from models.net import build

model = build().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x in torch.randn(10, 4, 8).cuda():
    model(x).mean().backward()
    optimizer.step()
"""


def found(capsys: pytest.CaptureFixture[str], *words: str) -> set[tuple[str, str]]:
    main(["lint", "--format", "json", *words])
    return {(each["path"], each["code"]) for each in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture
def lone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and a package, in no project."""
    folder = tmp_path / "lone"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "net.py").write_text(NET)
    (folder / "train.py").write_text(TRAIN)
    monkeypatch.chdir(folder)
    return folder


def test_a_named_folder_is_a_project_where_nothing_marks_one(lone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The findings are those in a repository: the script in the folder above trains what the module builds."""
    without = found(capsys, ".")
    assert ("models/net.py", "MPG101") in without
    (lone / ".git").mkdir()
    assert found(capsys, ".") == without


def test_the_cache_knows_which_folder_was_named(lone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = found(capsys, "models")
    assert ("net.py", "MPG101") not in {(Path(path).name, code) for path, code in alone}, "nothing there trains"
    assert ("models/net.py", "MPG101") in found(capsys, ".")
    assert found(capsys, "models") == alone
    assert found(capsys, "--no-cache", "models") == alone


def test_a_folder_of_a_project_stays_a_part_of_it(lone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lone / "pyproject.toml").touch()
    assert ("models/net.py", "MPG101") in found(capsys, "models")
