"""Reports for other programs: one module per format, each with `report(outcome) -> str`.

The names and texts of linted files are untrusted: control characters are removed from these reports, so that none is
executed by a terminal, splits an annotation in two, or makes XML invalid.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from mpguard.core.console import printable
from mpguard.lint.formats.terminal import Outcome
from mpguard.lint.model.finding import Finding

#: Format -> the environment variable in which its CI stores the root folder of paths.
ROOTS = {"github": "GITHUB_WORKSPACE", "gitlab": "CI_PROJECT_DIR"}


def document(name: str, outcome: Outcome) -> str:
    """Return the report in a format, by its name. Its module is imported on demand."""
    text: str = importlib.import_module(f"mpguard.lint.formats.{name}").report(outcome)
    return text


def below_root(path: str, name: str) -> str:
    """Return a path relative to the top of CI's checkout; a path elsewhere is returned unchanged."""
    root = os.environ.get(ROOTS[name]) or str(Path.cwd())
    try:
        inside = Path(path).absolute().relative_to(root)
    except ValueError:
        return path
    return inside.as_posix()


def headline(finding: Finding) -> str:
    """Return the message. For a notebook it includes the place in the cell: these formats have only lines of files."""
    where = "" if finding.cell is None else f"cell {finding.cell}, line {finding.line}: "
    return where + printable(finding.message)


def first_line(finding: Finding) -> int:
    """Return the line in the file; 1 for a notebook, where only the line in the cell is known."""
    return finding.line if finding.cell is None else 1
