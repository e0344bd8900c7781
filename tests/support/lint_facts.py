"""Facts of a piece of code."""

from __future__ import annotations

import textwrap

from mpguard.lint.facts.file import Facts
from mpguard.lint.source.source import Source


def facts_of(code: str) -> Facts:
    """Return the facts of a file without a project."""
    return Facts(Source.parse(textwrap.dedent(code).encode(), "example.py"))
