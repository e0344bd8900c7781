"""Notebooks: findings by cell, broken files, other languages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_rules import MakeRule, context, engine, places

from mpguard.core.text_edits import Edit
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.readers import notebook
from mpguard.lint.source.files import Target


def data(*sources: str, **metadata: Any) -> bytes:
    cells = [
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
        for source in sources
    ]
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1).encode()


def test_a_finding_has_its_cell_and_an_edit_changes_that_cell_only(tmp_path: Path, make_rule: MakeRule) -> None:
    here = context(tmp_path / "a.ipynb", "notebook", make_rule("MPG901", "alpha", becomes="beta"))
    before = data("x = 1", "y = 2\nalpha")
    checked = notebook.check(before, here)
    assert places(checked) == [("MPG901", 2)]
    assert checked.findings[0].cell == 2
    assert checked.edited is not None
    (diagnostic,) = checked.diagnostics
    assert checked.edited([Edit(*diagnostic.span, "beta")]) == before.replace(b"alpha", b"beta")


@pytest.mark.parametrize(("selectors", "codes"), [({}, ["MPG000"]), ({"ignore": ("MPG000",)}, [])])
def test_a_broken_notebook_is_a_syntax_error(
    tmp_path: Path, make_rule: MakeRule, selectors: dict[str, Any], codes: list[str]
) -> None:
    here = context(tmp_path / "a.ipynb", "notebook", make_rule("MPG901", "alpha"), selectors=Selectors(**selectors))
    checked = notebook.check(b'{"cells": [', here)
    assert [code for code, _ in places(checked)] == codes
    assert checked.encode is None


def test_one_broken_cell_is_reported_and_the_others_are_checked(tmp_path: Path, make_rule: MakeRule) -> None:
    here = context(tmp_path / "a.ipynb", "notebook", make_rule("MPG901", "alpha", becomes="beta"))
    before = data("alpha", "def f(:\n    pass\n", "x = 1\nalpha", "print 1")
    checked = notebook.check(before, here)
    assert [(each.code, each.cell, each.line) for each in checked.findings] == [
        ("MPG000", 2, 1), ("MPG000", 4, 1), ("MPG901", 1, 1), ("MPG901", 3, 2),
    ]  # fmt: skip
    assert {each.help for each in checked.findings if each.code == "MPG000"} == {"nothing in this cell was checked"}
    assert checked.edited is not None
    (last,) = (each for each in checked.diagnostics if each.code == "MPG901" and each.span[0] > 20)
    assert checked.edited([Edit(*last.span, "beta")]) == before.replace(b"1\\nalpha", b"1\\nbeta")


def test_a_fix_that_breaks_one_of_several_cells_is_not_applied(tmp_path: Path, make_rule: MakeRule) -> None:
    path = tmp_path / "a.ipynb"
    path.write_bytes(data("alpha", "x = 1"))
    used = engine(make_rule("MPG901", "alpha", becomes="def f(:"), fix="safe")
    (result,) = used.run([Target(str(path), "notebook", named=True)])
    assert result.fix_result is not None and result.fix_result.fixes == 0
    assert "does not parse" in result.fix_result.problems[0]


def test_a_notebook_in_another_language_is_not_checked(tmp_path: Path, make_rule: MakeRule) -> None:
    here = context(tmp_path / "a.ipynb", "notebook", make_rule("MPG901", "alpha"))
    checked = notebook.check(data("alpha", kernelspec={"language": "R", "name": "ir"}), here)
    assert (places(checked), checked.recognized) == ([], False)
