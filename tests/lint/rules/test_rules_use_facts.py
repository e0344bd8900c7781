"""Rules use the public part of `Facts`: its methods, the attributes that its docstring lists, and their methods."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from lint_facts import facts_of

from mpguard.lint import interface, rules
from mpguard.lint.facts.file import Facts
from mpguard.lint.project.api import ProjectApi

FOLDER = Path(rules.__file__).parent
FILES = sorted(path for path in FOLDER.rglob("*.py") if path.name != "__init__.py")
#: What `Facts` has for the modules of `mpguard.lint.facts` only, as its docstring says.
INTERNAL = {"source", "index", "values", "classes", "graph", "regions_index", "imported_module", "parsed_bytes"}


def _listed() -> set[str]:
    """Return the attributes that the docstring of `Facts` lists: a line with the name, and what it is."""
    return set(re.findall(r"^ {4}(\w+)  +\S", inspect.cleandoc(Facts.__doc__ or ""), re.MULTILINE))


def _documented(cls: type, name: str) -> bool:
    """True if a class has a public method or property of this name, with a docstring."""
    member = getattr(cls, name, None)  # None itself has a docstring from Python 3.13 on
    return not name.startswith("_") and member is not None and bool(inspect.getdoc(member))


def _classes() -> dict[str, type]:
    """Return the class of each attribute of `Facts` that has methods of its own."""
    facts = facts_of("x = 1\n")
    types = {name: type(getattr(facts, name)) for name in (*_listed(), "traces", "scalers")}
    types["project"] = ProjectApi
    free = list(vars(interface).values())  # records, whose fields rules read
    return {name: cls for name, cls in types.items() if cls.__module__ != "builtins" and cls not in free}


LISTED = _listed()
CLASSES = _classes()


class _Reader(ast.NodeVisitor):
    """Collects the accesses that reach past the public part of `Facts`."""

    def __init__(self) -> None:
        #: Variables that hold facts, and those that hold one of its attributes.
        self.facts, self.parts = {"facts"}, dict[str, str]()
        self.wrong: list[str] = []

    def _is_facts(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.facts
        if isinstance(node, ast.Attribute):  # `event.facts`, `region.facts`
            return node.attr == "facts"
        func = node.func if isinstance(node, ast.Call) else None
        return isinstance(func, ast.Attribute) and func.attr in ("of", "imported") and self._is_facts(func.value)

    def _part(self, node: ast.AST) -> str | None:
        """Return the attribute of facts that an expression is."""
        if isinstance(node, ast.Name):
            return self.parts.get(node.id)
        return node.attr if isinstance(node, ast.Attribute) and self._is_facts(node.value) else None

    def visit_arg(self, node: ast.arg) -> None:
        if node.annotation is not None and ast.unparse(node.annotation) in ("Facts", "Facts | None"):
            self.facts.add(node.arg)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(name, ast.Name) and self._is_facts(value):
                    self.facts.add(name.id)
                elif isinstance(name, ast.Name) and (part := self._part(value)) is not None:
                    self.parts[name.id] = part
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        part = self._part(node.value)
        if self._is_facts(node.value) and node.attr not in LISTED and not _documented(Facts, node.attr):
            self.wrong.append(f"facts.{node.attr}")
        if part in CLASSES and not _documented(CLASSES[part], node.attr):
            self.wrong.append(f"facts.{part}.{node.attr}")
        if node.attr == "chunk":
            self.wrong.append(f"{ast.unparse(node)}: a position; use `facts.span` or `facts.outer_span`")
        self.generic_visit(node)


def reaches_past(code: str) -> list[str]:
    reader = _Reader()
    reader.visit(ast.parse(code))
    return reader.wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_rule_uses_the_public_part_of_facts(path: Path) -> None:
    assert reaches_past(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("facts.index.parents.get(node)", "facts.index"),
        ("event.facts.values.lookup(x)", "facts.values"),
        ("facts.of(call).graph", "facts.graph"),
        ("def f(other: Facts):\n    other.regions_index", "facts.regions_index"),
        ("own = facts\nown._events", "facts._events"),
        ("facts.precision.facts", "facts.precision.facts"),
        ("facts.traces._all", "facts.traces._all"),
        ("traces, node = facts.traces, x\ntraces.facts", "facts.traces.facts"),
        ("Edit(*use.chunk.span(node), text)", "use.chunk: a position; use `facts.span` or `facts.outer_span`"),
    ],
)
def test_what_reaches_past_facts_is_found(code: str, wrong: str) -> None:
    assert reaches_past(code) == [wrong]


@pytest.mark.parametrize(
    "code",
    ["facts.parent(node)", "facts.calls['step']", "facts.flow.backward(x, at)", "facts.module.bindings", "x.index(y)"],
)
def test_public_uses_are_accepted(code: str) -> None:
    assert reaches_past(code) == []


def test_the_docstring_of_facts_lists_its_attributes() -> None:
    """Each attribute is either listed or internal."""
    attributes = {name for name in vars(facts_of("x = 1\n")) if not name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", (Facts.__doc__ or "").split("also use")[1])) == INTERNAL
    assert attributes == LISTED | INTERNAL
    assert not LISTED & INTERNAL
