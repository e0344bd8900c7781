"""Loops as the libraries' documentation teaches them stay silent; the classical wrong forms do not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mpguard.lint.model.finding import Finding
from mpguard.lint.model.rule import rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target

HERE = Path(__file__).parent / "corpus"
RIGHT, WRONG = sorted((HERE / "right").glob("*.py")), sorted((HERE / "wrong").glob("*.py"))
MARK = re.compile(r"# !((?: MPG\d{3})+)$")


def findings(path: Path, folder: Path, selectors: Selectors) -> list[Finding]:
    """What is found in a copy: a folder of tests is not judged like others."""
    path = Path(shutil.copy(path, folder))
    (report,) = Engine(rules(own_only=True), Options(selectors)).run([Target(str(path), "python", named=True)])
    assert not report.defects, report.defects[0].traceback
    return list(report.findings)


@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "selectors", [Selectors(), Selectors(select=("ALL",), preview=True)], ids=["default", "preview"]
)
def test_what_documentation_teaches_is_silent(path: Path, selectors: Selectors, tmp_path: Path) -> None:
    informative = {code for code, rule in rules(own_only=True).items() if rule.severity == "info"}
    assert [(f.line, f.code) for f in findings(path, tmp_path, selectors) if f.code not in informative] == []


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_the_classical_mistakes_are_found(path: Path, tmp_path: Path) -> None:
    lines = path.read_text().splitlines()
    marked = {(n, code) for n, line in enumerate(lines, 1) if (m := MARK.search(line)) for code in m[1].split()}
    assert marked
    assert {(finding.line, finding.code) for finding in findings(path, tmp_path, Selectors())} == marked
