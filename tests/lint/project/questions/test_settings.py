"""What the scripts, configs and code of a project ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpguard.core.tracked_fs import clear_run_caches as new_run
from mpguard.lint.project.questions import answered, ask, settings


@pytest.fixture
def project(tmp_path: Path) -> Path:
    new_run()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "train.py").write_text("print(args.lr)\n")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "passed"),
    [("python train.py --mixed-precision fp16", True), ("python train.py --mixed_precision no", False), ("", False)],
)
def test_an_option_is_passed_with_a_value_for_low_precision(project: Path, line: str, passed: bool) -> None:
    (project / "run.sh").write_text(f"{line}\n")
    assert ask(project, "", settings.passes_option, "mixed_precision") is passed


@pytest.mark.parametrize(
    ("code", "read"),
    [("print(args.bf16)\n", True), ("print(args['bf16'])\n", True), ("run(**vars(args))\n", True), ("", False)],
)
def test_an_option_is_read_by_its_name_or_with_all_others(project: Path, code: str, read: bool) -> None:
    (project / "model.py").write_text(code)
    assert ask(project, "", settings.may_read_option, "bf16") is read


def test_a_config_gives_an_option_a_value_unless_it_is_of_accelerate(project: Path) -> None:
    (project / "run.yaml").write_text("precision: bf16\n")
    assert ask(project, "", settings.gives_option, "precision bf16")
    (project / "run.yaml").write_text("distributed_type: NO\nprecision: bf16\n")
    new_run()
    assert not ask(project, "", settings.gives_option, "precision bf16")


def test_a_key_that_no_code_names_is_unread(project: Path) -> None:
    (project / "run.yaml").write_text("train:\n  lr: 1\n  use_amp: true\n")
    (project / "train.py").write_text("config = load('run.yaml')\nprint(config['train']['lr'])\n")
    assert answered(project, project / "train.py", settings.unread_keys) == [f"{project / 'run.yaml'}:use_amp"]
    (project / "train.py").write_text("config = load('run.yaml')\nprint(config['train']['use_amp'])\n")
    new_run()
    assert answered(project, project / "train.py", settings.unread_keys) == []


@pytest.mark.parametrize(
    ("code", "updates"),
    [(b"scaler.update()", True), (b"self.update()", False), (b"progress_bar.update()", False), (b"d.update(x)", False)],
)
def test_what_updates_a_scaler(code: bytes, updates: bool) -> None:
    assert settings.updates(code) is updates
