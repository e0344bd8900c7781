"""What a finding is by, wherever in its file it has moved to: its path, its code and its line of source."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable

from mpguard.lint.model.finding import Finding


def source_line(finding: Finding) -> str:
    """The line that a finding begins on, without what reformatting changes: indentation and runs of spaces."""
    return " ".join(dict(finding.source).get(finding.line, "").split())


def fingerprints(findings: Iterable[Finding], name: Callable[[str], str]) -> list[str]:
    """A digest for each; those that are alike in all are told apart by their order.

    name: what a path is called from one run to the next, wherever each is started.
    """
    seen: Counter[tuple[str, str, str]] = Counter()
    digests = []
    for finding in findings:
        key = (name(finding.path), finding.code, source_line(finding))
        seen[key] += 1
        text = "\0".join((*key, str(seen[key])))
        digests.append(hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32])
    return digests
