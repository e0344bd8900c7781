"""Notebooks: the code cells of one, as one Python program."""

from __future__ import annotations

from mpguard.lint.model.finding import Lines
from mpguard.lint.model.result import SYNTAX, FileCheck
from mpguard.lint.model.rule import Diagnostic
from mpguard.lint.run.readers import python
from mpguard.lint.run.readers.context import Context, RuleOutput, not_checked, replaced_text


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
    cells = [cell.start for cell in notebook.cells]
    checked = python.check(notebook.program.encode("utf-8", "replace"), context, cells)
    checked.findings = [notebook.relocated(finding) for finding in checked.findings]
    checked.edited = notebook.edited
    return checked
