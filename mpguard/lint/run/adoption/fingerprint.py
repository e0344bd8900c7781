"""Identifies a finding independently of its line number: by its path, its code and its line of source."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable

from mpguard.lint.model.finding import Finding


def source_line(finding: Finding) -> str:
    """Return the line that a finding begins on, without indentation and runs of spaces, which reformatting changes."""
    return " ".join(dict(finding.source).get(finding.line, "").split())


def fingerprints(findings: Iterable[Finding], name: Callable[[str], str]) -> list[str]:
    """Return a digest for each finding; equal ones are distinguished by their order.

    name: returns a path as all runs name it, whatever their working directory.
    """
    seen: Counter[tuple[str, str, str]] = Counter()
    digests = []
    for finding in findings:
        key = (name(finding.path), finding.code, source_line(finding))
        seen[key] += 1
        text = "\0".join((*key, str(seen[key])))
        digests.append(hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32])
    return digests
