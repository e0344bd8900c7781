"""Reports for other programs: one module per format, each with `report(outcome) -> str`.

A linted file's name and text are not ours: whatever ends up in these reports is without control characters, so that
none is obeyed by a terminal, splits an annotation in two, or makes XML that cannot be read.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from mpguard.core.console import printable
from mpguard.lint.formats.terminal import Outcome
from mpguard.lint.model.finding import Finding

#: Format -> the environment variable with the folder that its paths are from, where its CI sets one.
ROOTS = {"github": "GITHUB_WORKSPACE", "gitlab": "CI_PROJECT_DIR"}


def document(name: str, outcome: Outcome) -> str:
    """The report in one of the formats, by its name. Its module is imported only then."""
    text: str = importlib.import_module(f"mpguard.lint.formats.{name}").report(outcome)
    return text


def below_root(path: str, name: str) -> str:
    """A path as CI knows it: from the top of its checkout; one that lies elsewhere as it is given."""
    root = os.environ.get(ROOTS[name]) or str(Path.cwd())
    try:
        inside = Path(path).absolute().relative_to(root)
    except ValueError:
        return path
    return inside.as_posix()


def headline(finding: Finding) -> str:
    """What is wrong. In a notebook with the place in its cell: readers of these formats only know lines of the file."""
    where = "" if finding.cell is None else f"cell {finding.cell}, line {finding.line}: "
    return where + printable(finding.message)


def first_line(finding: Finding) -> int:
    """The line in the file; 1 where only the one in a notebook's cell is known."""
    return finding.line if finding.cell is None else 1
