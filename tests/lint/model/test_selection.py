"""Which rules run: the command line, and the settings of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_rules import MakeRule, engine, found, report

from mpguard.lint.model.selection import Selectors
from mpguard.lint.source.files import Target


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        (Selectors(), {"MPG901", "MPG911"}),
        (Selectors(select=("MPG901",)), {"MPG901"}),
        (Selectors(select=("MPG9",)), {"MPG901", "MPG911"}),
        (Selectors(select=("ALL",), ignore=("MPG91",)), {"MPG901"}),
        (Selectors(ignore=("MPG9",), extend_select=("MPG901",)), {"MPG901"}),
        (Selectors(ignore=("MPG901",)), {"MPG911"}),
        (Selectors(extend_select=("MPG921",)), {"MPG901", "MPG911", "MPG921"}),
        (Selectors(extend_select=("MPG92",)), {"MPG901", "MPG911"}),
        (Selectors(extend_select=("MPG92",), preview=True), {"MPG901", "MPG911", "MPG921"}),
        (Selectors(select=("ALL",), preview=True), {"MPG901", "MPG911", "MPG921"}),
    ],
)
def test_selection(tmp_path: Path, make_rule: MakeRule, selectors: Selectors, expected: set[str]) -> None:
    made = make_rule("MPG901", "alpha"), make_rule("MPG911", "beta"), make_rule("MPG921", "gamma", preview=True)
    assert {code for code, _ in found(report(tmp_path, "alpha, beta, gamma\n", *made, selectors=selectors))} == expected


def test_settings_select_and_the_command_line_replaces_it(tmp_path: Path, make_rule: MakeRule) -> None:
    (tmp_path / "mpguard.toml").write_text("select = ['MPG901']\n[per-file-ignores]\n'gen/*' = ['MPG9']\n")
    made = make_rule("MPG901", "alpha"), make_rule("MPG911", "beta")
    assert found(report(tmp_path, "alpha\nbeta\n", *made)) == [("MPG901", 1)]
    assert found(report(tmp_path, "alpha\nbeta\n", *made, selectors=Selectors(select=("MPG911",)))) == [("MPG911", 2)]
    (tmp_path / "gen").mkdir()
    (tmp_path / "gen" / "a.py").write_text("alpha\n")
    (result,) = engine(*made).run([Target(str(tmp_path / "gen" / "a.py"), "python")])
    assert found(result) == []
