"""The generated pages of docs/ are what docs/generate.py writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from paths import REPOSITORY

DOCS = REPOSITORY / "docs"

_spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
assert _spec is not None and _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)

PAGES: dict[str, str] = generate.pages()
AGAIN = "run `make docs`, or `python docs/generate.py`"


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("rules/")])
def test_a_committed_page_is_what_the_generator_writes(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == PAGES[name], AGAIN


def test_the_readme_shows_what_the_linter_prints() -> None:
    readme = generate.README.read_text("utf-8")
    assert "<!-- output of: mpguard lint " in readme
    assert generate.readme(readme) == readme, AGAIN


def test_writes_what_differs_and_removes_pages_of_rules_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "MPG999.md").write_text("gone")
    (tmp_path / "cli.md").write_text("old")
    differing = generate.write(tmp_path, check=True)
    assert "rules/MPG999.md" in differing and "cli.md" in differing and (tmp_path / "cli.md").read_text() == "old"
    assert generate.write(tmp_path) == differing
    assert generate.write(tmp_path, check=True) == []
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")} == set(PAGES)


@pytest.mark.parametrize("name", ["recipes.md", "targets.md", "cli.md"])
def test_tables_are_whole(name: str) -> None:
    """Every row has as many cells as its header."""
    for table in PAGES[name].split("\n\n"):
        if table.startswith("| "):
            assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1, table
