"""Imports run one way: no module imports, at once, when called or for a type, what imports it."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*(ROOT / "mpguard").rglob("*.py"), *(ROOT / "plugins" / "mpguard_plugins").rglob("*.py")]


def _name(path: Path) -> str:
    inside = path.relative_to(ROOT / "plugins" if "plugins" in path.relative_to(ROOT).parts[:1] else ROOT)
    return ".".join(inside.with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name(path): path for path in FILES}

#: Doors: a low module hands a call on to a higher one. CONTRIBUTING.md names them.
DOORS = {
    ("mpguard.policy", "mpguard.plugin"): "`Policy.to`",
    ("mpguard.document", "mpguard.document.rewrite"): "`Document.edits`",
    ("mpguard", "mpguard.runtime"): "`mpguard.activate`, `mpguard.prove`",
}
#: The facts of a file ask each other through this one: they import its type alone.
FACTS = "mpguard.lint.facts.file"


def _imports(name: str) -> Iterator[tuple[str, bool]]:
    """The modules of ours that a module imports, and whether only for types."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        asked: list[str] = []
        if isinstance(node, ast.Import):
            asked = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            asked = [f"{node.module}.{alias.name}" for alias in node.names]
        for each in asked:
            found = each if each in MODULES else each.rpartition(".")[0]
            if found in MODULES and found != name:
                yield found, id(node) in typed


def _order(graph: dict[str, set[str]]) -> None:
    """Raises `CycleError` where there is none."""
    graphlib.TopologicalSorter(graph).prepare()


@functools.cache
def _graph() -> dict[str, set[str]]:
    return {
        name: {
            other
            for other, typed in _imports(name)
            if (name, other) not in DOORS and not (typed and other == FACTS and name.startswith("mpguard.lint.facts."))
        }
        for name in MODULES
    }


def test_imports_run_one_way() -> None:
    _order(_graph())


@pytest.mark.parametrize("door", DOORS, ids=DOORS.values())
def test_a_door_is_one(door: tuple[str, str]) -> None:
    """Each is there, and would be a circle if it were none of these: the test can fail."""
    low, high = door
    assert high in {other for other, _ in _imports(low)}
    with pytest.raises(graphlib.CycleError):
        _order({**_graph(), low: _graph()[low] | {high}})
