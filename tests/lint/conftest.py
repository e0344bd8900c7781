"""A rule for one test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from made_rules import MakeRule

from mpguard.core.text_edits import Edit
from mpguard.lint.model import rule as registry
from mpguard.lint.model.rule import BaseRule, Diagnostic, Fix, Rule, any_of


@pytest.fixture
def make_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRule]:
    """Return a function that creates a rule; the rule reports each occurrence of a word, in this test only."""
    made: list[str] = []

    def make(code: str, word: str, *, becomes: str | None = None, safe: bool = True, **more: Any) -> type[BaseRule]:
        def check(self: Rule, facts: Any) -> Iterator[Diagnostic]:
            start = -1
            while (start := facts.source.text.find(word, start + 1)) >= 0:
                fix = None
                if becomes is not None:
                    fix = Fix(
                        f"Write {becomes}", "safe" if safe else "unsafe", (Edit(start, start + len(word), becomes),)
                    )
                yield self.at((start, start + len(word)), fix=fix)

        body = {
            "__doc__": "Made for a test.", "code": code, "name": f"made-{code.lower()}", "severity": "error",
            "message": f"`{word}` is there", "triggers": (any_of(word.encode()),), "check": check, **more,
        }  # fmt: skip
        made.append(code)
        return type(f"Made{code}", (Rule,), body)

    yield make
    for code in made:
        registry._RULES.pop(code, None)
