"""Each row of `project_words` names evidence that exists: a judged package, an example of a rule, or a repository."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import rule_cases

from mpguard.lint.facts.program import project_words
from mpguard.lint.facts.program.project_words import ProjectWord
from mpguard.lint.model.rule import rules

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
TABLES = {
    name: rows
    for name, rows in vars(project_words).items()
    if isinstance(rows, tuple) and rows and isinstance(rows[0], ProjectWord)
}
ROWS = [pytest.param(row, id=f"{name}-{row.word}") for name, rows in TABLES.items() for row in rows]


@pytest.fixture(scope="module")
def packages() -> set[str]:
    lines = (BENCHMARKS / "evidence_packages.txt").read_text().splitlines()
    names = {line.split()[0] for line in lines if not line.startswith("#")}
    pending = [json.loads((BENCHMARKS / "evidence_unseen.json").read_text())]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            names |= {package["name"] for package in item.get("packages", ()) if isinstance(package, dict)}
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return names


def examples(code: str) -> str:
    """Return the code of all examples of a rule."""
    return "\n".join(example.code for example in rule_cases.examples(rules()[code]))


@pytest.mark.parametrize("row", ROWS)
def test_each_row_has_a_meaning_and_evidence(row: ProjectWord, packages: set[str]) -> None:
    assert row.meaning
    assert row.needed_by
    for evidence in row.needed_by:
        if re.fullmatch(r"MPG\d{3}", evidence):
            word = row.word.removesuffix("$")
            assert re.search(word, examples(evidence), re.IGNORECASE), f"{evidence} has no example with {word}"
        else:
            assert evidence in packages or re.fullmatch(r"[\w-]+/[\w.-]+", evidence), evidence


@pytest.mark.parametrize("name", TABLES)
def test_each_table_is_used(name: str) -> None:
    """A table of rows makes one public name, which other modules of the facts use."""
    public = name.removeprefix("_")
    folder = Path(project_words.__file__).parents[1]
    texts = (path.read_text() for path in folder.rglob("*.py") if path != Path(project_words.__file__))
    assert any(f"project_words.{public}" in text for text in texts)
