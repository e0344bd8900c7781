"""Notebooks: the code cells of one, as one Python program."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from mpguard.lint.model.finding import Lines
from mpguard.lint.model.result import SYNTAX, FileCheck
from mpguard.lint.model.rule import Diagnostic
from mpguard.lint.run.readers import python
from mpguard.lint.run.readers.context import Context, RuleOutput, not_checked, replaced_text

if TYPE_CHECKING:
    from mpguard.lint.embedded.notebook import Notebook


def check(data: bytes, context: Context) -> FileCheck:
    """Check the code cells of a notebook."""
    from mpguard.lint.embedded.notebook import BrokenNotebook, Notebook

    try:
        notebook = Notebook(data)
    except BrokenNotebook as error:
        diagnostic = Diagnostic(SYNTAX, (error.offset, error.offset), error.message, context.rules[SYNTAX].help)
        diagnostics = [diagnostic] if context.is_on(SYNTAX) else []
        return context.finish(RuleOutput(Lines(replaced_text(data)), diagnostics, set()))
    if not notebook.python:
        return not_checked(recognized=False)
    checked = _check_cells(notebook, context)
    checked.findings = [notebook.relocated(finding) for finding in checked.findings]
    checked.edited = notebook.edited
    return checked


def _check_cells(notebook: Notebook, context: Context) -> FileCheck:
    """Check the cells as one program. A cell that does not parse is reported, and the others are checked without it."""
    program = notebook.program
    checked = python.check(program.encode("utf-8", "replace"), context)
    broken: list[Diagnostic] = []
    for _ in notebook.cells[1:]:
        error = next((each for each in checked.diagnostics if each.code == SYNTAX and checked.encode is None), None)
        if error is None:
            break
        cell = notebook.cell_at(error.span[0])
        blank = re.sub(r"[^\r\n]", " ", program[cell.start : cell.end])
        if program[cell.start : cell.end] == blank:
            break  # the error is not in one cell
        broken.append(dataclasses.replace(error, help="nothing in this cell was checked"))
        program = program[: cell.start] + blank + program[cell.end :]
        checked = python.check(program.encode("utf-8", "replace"), context)
    checked.diagnostics = [*broken, *checked.diagnostics]
    checked.findings = [*context.placed(broken, checked.lines), *checked.findings]
    return checked
