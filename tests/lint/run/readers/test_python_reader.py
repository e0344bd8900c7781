"""Python code: what is parsed at all, syntax errors, DeepSpeed configs in dicts, and how a file is encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_rules import MakeRule, context, places

from mpguard.lint.facts.file import Facts
from mpguard.lint.run.readers import python

DICT = b"""\
import deepspeed
CONFIG = {
    "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "fp16": {"enabled": True},
}
deepspeed.initialize(model=model, config=CONFIG)
"""


def test_a_found_file_is_not_parsed_where_no_rule_is_triggered(
    tmp_path: Path, make_rule: MakeRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(*_: Any, **__: Any) -> Facts:
        raise AssertionError("the file was parsed")

    here = context(tmp_path / "a.py", "python", make_rule("MPG901", "alpha"), named=False)
    assert places(python.check(b"x = alpha\n", here)) == [("MPG901", 1)]
    monkeypatch.setattr(python, "Facts", parsed)
    assert places(python.check(b"x = (\n", here)) == []


@pytest.mark.parametrize(
    ("data", "named", "found"),
    [
        (b"x = (\n", True, [("MPG000", 1)]),
        (b"x = (\n", False, []),
        (b"alpha = (\n", False, [("MPG000", 1)]),
        (b"x = 1\nalpha\x00\n", True, [("MPG000", 2)]),
        (b"alpha\n" + b"(" * 5000 + b")" * 5000 + b"\n", True, [("MPG000", 2)]),
    ],
)
def test_syntax_errors_are_reported_where_a_rule_reads_the_file_or_it_is_named(
    tmp_path: Path, make_rule: MakeRule, data: bytes, named: bool, found: list[tuple[str, int]]
) -> None:
    checked = python.check(data, context(tmp_path / "a.py", "python", make_rule("MPG901", "alpha"), named=named))
    assert places(checked) == found
    assert not found or checked.encode is None


def test_a_dict_that_deepspeed_gets_is_checked_as_a_config(tmp_path: Path) -> None:
    checked = python.check(DICT, context(tmp_path / "a.py", "python"))
    assert places(checked) == [("MPG821", 3)]


@pytest.mark.parametrize("data", [b"\xef\xbb\xbfalpha\n", b"# coding: latin-1\n# \xe9\nalpha\n", b"alpha\r\n"])
def test_a_new_text_gets_the_encoding_of_the_file(tmp_path: Path, make_rule: MakeRule, data: bytes) -> None:
    checked = python.check(data, context(tmp_path / "a.py", "python", make_rule("MPG901", "alpha")))
    assert [code for code, _ in places(checked)] == ["MPG901"]
    assert checked.encode is not None
    assert checked.encode(checked.lines.text) == data


def test_a_broken_module_that_a_file_imports_is_read_no_more(tmp_path: Path, make_rule: MakeRule) -> None:
    """The file is checked once more without it, and has its own findings."""

    def check(self: Any, facts: Facts) -> Any:
        other = facts.imported("broken")
        if other is not None:
            other.need_all()
        yield self.at((0, 5))

    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "broken.py").write_text("def f(:\n    alpha()\n")
    rule = make_rule("MPG901", "alpha", check=check)
    checked = python.check(b"alpha\nimport broken\n", context(tmp_path / "a.py", "python", rule))
    assert places(checked) == [("MPG901", 1)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("{{cookiecutter.name}}/model.py", b"import torch\nx = alpha {\n"),
        ("model.py", b"import {{ cookiecutter.name }}\nx = alpha\n"),
        ("model.py", b"import torch\nsteps=${steps}\n"),
        ("model.py", b"x = alpha\n{% if cookiecutter.torch %}\nimport torch\n{% endif %}\n"),
    ],
)
def test_a_template_is_no_python_file_unless_it_is_named(
    tmp_path: Path, make_rule: MakeRule, name: str, code: bytes
) -> None:
    rule = make_rule("MPG901", "alpha")
    found = context(tmp_path / name, "python", rule, named=False)
    named = context(tmp_path / name, "python", rule, named=True)
    assert places(python.check(code, found)) == []
    assert [code for code, _ in places(python.check(code, named))] == ["MPG000"]


def test_a_syntax_error_near_a_set_of_sets_is_reported(tmp_path: Path, make_rule: MakeRule) -> None:
    here = context(tmp_path / "a.py", "python", make_rule("MPG901", "alpha"), named=False)
    assert [code for code, _ in places(python.check(b"x = {{alpha: 1}}\ny = = 1\n", here))] == ["MPG000"]


def test_a_file_with_a_syntax_error_gets_that_finding_only(tmp_path: Path) -> None:
    """Also where it was found in a folder and only a suppression would be reported: a fix could not be checked."""
    text = b"import torch\nx = 1  # noqa: MPG101\ndef f(:\n"
    here = context(tmp_path / "a.py", "python", named=False)
    assert places(python.check(text, here)) == [("MPG000", 3)]
    assert places(python.check(text.replace(b"(:", b"(): 1"), here)) == [("MPG002", 2)]
