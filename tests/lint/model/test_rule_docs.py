"""docs/rules/ has the pages that the rules generate."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import REPOSITORY

from mpguard.lint.model import rule_docs
from mpguard.lint.model.retired import RETIRED

DOCS = REPOSITORY / "docs"
PAGES = rule_docs.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_committed_page_is_what_the_rules_say(name: str) -> None:
    """What follows in a committed page is the evidence for the rule, which docs/generate.py adds."""
    path = DOCS / name
    assert path.exists() and path.read_text("utf-8").startswith(PAGES[name].rstrip()), "run `make docs`"


def test_no_page_of_a_rule_that_is_gone() -> None:
    assert {f"rules/{path.name}" for path in (DOCS / "rules").glob("*")} == set(PAGES)


def test_each_rule_is_in_the_index() -> None:
    index, _, retired = PAGES["rules/README.md"].partition("## Retired codes")
    assert all(f"| {code} |" in retired for code in RETIRED)
    assert all(index.count(f"({name.removeprefix('rules/')})") == 1 for name in PAGES if not name.endswith("README.md"))


def test_writes_what_differs_and_removes_what_is_gone(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "MPG999.md").write_text("gone")
    (tmp_path / "rules" / "MPG101.md").write_text("old")
    assert rule_docs.main([str(tmp_path)]) == 0
    assert not (tmp_path / "rules" / "MPG999.md").exists()
    assert {f"rules/{path.name}": path.read_text("utf-8") for path in (tmp_path / "rules").iterdir()} == PAGES
