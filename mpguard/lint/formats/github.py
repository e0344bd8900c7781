"""Workflow commands that GitHub shows as annotations in a pull request."""

from __future__ import annotations

from mpguard.core.console import printable
from mpguard.lint.formats import below_root, first_line
from mpguard.lint.formats.terminal import Outcome
from mpguard.lint.model.finding import Finding

_LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def report(outcome: Outcome) -> str:
    """Return the findings, and what could not be checked, as workflow commands."""
    commands = [_command(finding) for finding in outcome.findings]
    commands += [f"::error title=mpguard::{_data(problem)}" for problem in outcome.trouble]
    return "\n".join(commands)


def _command(finding: Finding) -> str:
    line = first_line(finding)
    values = {
        "title": f"{finding.code} ({finding.name})",
        "file": below_root(finding.path, "github"),
        "line": str(line),
    }
    if finding.cell is None:
        values["endLine"] = str(finding.end_line)
        if finding.end_line == line:  # GitHub accepts columns on one line only
            values |= {"col": str(finding.column), "endColumn": str(finding.end_column)}
    message = f"{finding.file}:{finding.line}:{finding.column}: {finding.code} {finding.message}"
    if finding.help:
        message += f"\n{finding.help}"
    properties = ",".join(f"{key}={_property(value)}" for key, value in values.items())
    return f"::{_LEVELS[finding.severity]} {properties}::{_data(message)}"


def _data(text: str) -> str:
    """Encode a message for the runner: `%0A` for line breaks, and no other control character."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "%0A".join(printable(line).replace("%", "%25") for line in lines)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
