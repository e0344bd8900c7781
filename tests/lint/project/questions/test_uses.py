"""Do other files of a project use what a file defines?"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpguard.core.tracked_fs import clear_run_caches as new_run
from mpguard.lint.project.questions import ask, uses


@pytest.fixture
def project(tmp_path: Path) -> Path:
    new_run()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "model.py").write_text("class Net: ...\n\ndef build(): ...\n\ndef old(): ...\n")
    (tmp_path / "train.py").write_text(
        "from model import Net, build\n\nclass Deep(Net): ...\n\nprint(build(), Deep())\n"
    )
    return tmp_path


@pytest.mark.parametrize(("name", "used"), [("Net", True), ("build", True), ("old", False)])
def test_a_name_is_used_where_other_code_mentions_it(project: Path, name: str, used: bool) -> None:
    assert ask(project, project / "model.py", uses.may_use, name) is used


def test_an_import_alone_is_no_use(project: Path) -> None:
    (project / "train.py").write_text("from model import old\n")
    assert not ask(project, project / "model.py", uses.may_use, "old")


def test_a_script_that_names_a_file_uses_it(project: Path) -> None:
    assert not ask(project, project / "train.py", uses.may_use)
    (project / "run.sh").write_text("python train.py\n")
    new_run()
    assert ask(project, project / "train.py", uses.may_use)


def test_a_question_about_the_project_has_one_answer_for_all_files(project: Path) -> None:
    assert not ask(project, project / "model.py", uses.may_look_up)
    (project / "factory.py").write_text("import importlib\nimportlib.import_module(name)\n")
    new_run()
    assert ask(project, project / "model.py", uses.may_look_up)
    assert ask(project, "", uses.may_look_up)


def test_a_user_that_nothing_uses_is_none(project: Path) -> None:
    """`old` is called by a function that nothing calls."""
    (project / "helpers.py").write_text("from model import old\n\ndef unused():\n    return old()\n")
    assert not ask(project, project / "model.py", uses.may_use, "old")
    (project / "train.py").write_text("from helpers import unused\nunused()\n")
    new_run()
    assert ask(project, project / "model.py", uses.may_use, "old")
