"""Rules import what they need from `mpguard.lint`: the names there are what a rule may use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpguard.lint
from mpguard.lint import interface, rules

NAMES = vars(interface).keys()
FOLDER = Path(rules.__file__).parent
FILES = sorted(path for path in FOLDER.rglob("*.py") if path.name != "__init__.py")
#: libcst: rules match nodes of the syntax tree.
ALLOWED = sys.stdlib_module_names | {"libcst", "mpguard.lint"}


def imports(code: str) -> Iterator[tuple[str, str]]:
    """Yield the module of each import, by its package outside mpguard, and the name that is imported from it."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            package = module.split(".")[0]
            yield (module if package in ("", "mpguard") else package), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_rule_imports_only_mpguard_lint(path: Path) -> None:
    for module, name in imports(path.read_text(encoding="utf-8")):
        assert module in ALLOWED, f"{path.name} imports {module}; add the name to mpguard/lint/interface.py"
        assert module != "mpguard.lint" or name in NAMES, f"{path.name}: mpguard.lint has no {name}"


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("from mpguard.policy.dtype import Dtype", "mpguard.policy.dtype"),
        ("import mpguard.core", "mpguard.core"),
        ("def f():\n    from mpguard import document", "mpguard"),
        ("from . import other", "."),
        ("import yaml.nodes", "yaml"),
    ],
)
def test_other_imports_are_found(code: str, module: str) -> None:
    assert [found for found, _ in imports(code)] == [module]
    assert module not in ALLOWED


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"module 'mpguard.lint' has no attribute 'nothing'"):
        _ = mpguard.lint.nothing
