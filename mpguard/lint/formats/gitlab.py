"""The Code Quality report of GitLab (`artifacts: reports: codequality:`)."""

from __future__ import annotations

import json
from typing import Any

from mpguard.core.console import printable
from mpguard.lint.formats import below_root, first_line, headline
from mpguard.lint.formats.terminal import Outcome
from mpguard.lint.model.finding import Finding
from mpguard.lint.run.adoption.fingerprint import fingerprints

_SEVERITIES = {"error": "critical", "warning": "major", "info": "info"}


def report(outcome: Outcome) -> str:
    """Return the findings as a Code Quality report."""
    findings = outcome.findings
    digests = fingerprints(findings, lambda path: below_root(path, "gitlab"))
    return json.dumps([_issue(*pair) for pair in zip(findings, digests, strict=True)], indent=2)


def _issue(finding: Finding, fingerprint: str) -> dict[str, Any]:
    begin = {"line": first_line(finding), "column": finding.column}
    end = {"line": finding.end_line, "column": finding.end_column}
    if finding.cell is not None:
        begin = end = {"line": 1, "column": 1}
    return {
        "description": f"{finding.code}: {headline(finding)}",
        "check_name": finding.name,
        "fingerprint": fingerprint,
        "severity": _SEVERITIES[finding.severity],
        "location": {
            "path": printable(below_root(finding.path, "gitlab")),
            "positions": {"begin": begin, "end": end},
        },
    }
