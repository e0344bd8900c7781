"""Imports go one way: between the rooms of the package, and between its modules."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import deepspeed_operator
import pytest
from paths import REPOSITORY, TESTS

PACKAGE, PLUGINS = REPOSITORY / "mpguard", REPOSITORY / "plugins" / "mpguard_plugins"

#: The rooms. A room imports only itself and rooms of an earlier line; rooms of one line do not import each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("policy",),
    ("targets",),
    ("document", "nn"),
    ("lint", "runtime"),
    ("compare", "doctor", "estimate", "explain", "server", "tune", "watching"),
    ("numerics",),
    ("cli",),
    ("__init__", "__main__", "auto", "run"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

#: Doors: a low module hands a call on to a higher one, which it imports when it is called. There are no others.
DOORS = {
    ("mpguard.policy.policy", "mpguard.targets.inject"): "`Policy.to`",
    ("mpguard.document", "mpguard.document.rewrite"): "`Document.edits`",
}

#: What a plugin may import of mpguard: names that are in `__all__` of one of these.
PUBLIC = ("mpguard", "mpguard.policy", "mpguard.targets", "mpguard.nn.grad_scaler")

#: The floors inside of `mpguard.lint`: a module imports only those of its own floor and of earlier ones. A module
#: belongs to the longest of these names that it begins with.
LINT_FLOORS = (
    "mpguard.lint.source",
    "mpguard.lint.project",
    "mpguard.lint.facts.syntax",
    "mpguard.lint.facts.program",
    "mpguard.lint.reachability",
    "mpguard.lint.facts.behaviour",
    "mpguard.lint.facts.domain",
    "mpguard.lint.facts.file",
    "mpguard.lint.project.project",  # makes the facts of other files
    "mpguard.lint.model",
    "mpguard.lint.configs",
    "mpguard.lint",  # the names that rules import
    "mpguard.lint.rules",
    "mpguard.lint.embedded",
    "mpguard.lint.run",
    "mpguard.lint.formats",
)


def _name(parts: tuple[str, ...]) -> str:
    return ".".join(parts).removesuffix(".__init__")


MODULES = {
    _name(path.relative_to(folder.parent).with_suffix("").parts): path
    for folder in (PACKAGE, PLUGINS)
    for path in folder.rglob("*.py")
}


def _imports(name: str) -> Iterator[str]:
    """Yield the modules of mpguard that a module imports, those for type checkers among them."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        imported: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            imported = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [(node.module or "", alias.name) for alias in node.names]
        for module, attribute in imported:
            found = f"{module}.{attribute}" if f"{module}.{attribute}" in MODULES else module
            if found in MODULES and found != name:
                yield found


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@functools.cache
def _graph() -> dict[str, set[str]]:
    return {name: {other for other in _imports(name) if (name, other) not in DOORS} for name in MODULES}


def _check_order(graph: dict[str, set[str]]) -> None:
    """Raise `CycleError` if modules import each other in a circle."""
    graphlib.TopologicalSorter(graph).prepare()


def _wrong_way(graph: dict[str, set[str]]) -> list[str]:
    """The imports that go up, or across a floor."""
    return [
        f"{name} imports {other}"
        for name, others in sorted(graph.items())
        for other in sorted(others)
        if name.startswith("mpguard.") and _room(name) != _room(other) and FLOOR[_room(other)] >= FLOOR[_room(name)]
    ]


def test_every_room_has_a_floor() -> None:
    assert {_room(name) for name in MODULES if name.split(".")[0] == "mpguard"} == set(FLOOR)


def test_modules_import_one_way() -> None:
    _check_order(_graph())


def test_rooms_import_one_way() -> None:
    """Among others: runtime imports no lint, and lint no runtime."""
    assert _wrong_way(_graph()) == []
    for lower, higher in (("runtime", "lint"), ("lint", "runtime"), ("core", "policy")):
        wrong = {f"mpguard.{lower}.x": {f"mpguard.{higher}.y"}}
        assert _wrong_way(wrong) == [f"mpguard.{lower}.x imports mpguard.{higher}.y"], "the test can fail"


def _lint_floor(module: str) -> int:
    """Return the floor of a module of the linter; -1 for other modules."""
    found = [floor for floor in LINT_FLOORS if module == floor or module.startswith(f"{floor}.")]
    return LINT_FLOORS.index(max(found, key=len)) if found else -1


def _upward(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports of the linter that go up."""
    return [
        f"{name} imports {other}"
        for name, others in sorted(graph.items())
        for other in sorted(others)
        if _lint_floor(name) >= 0 and _lint_floor(other) > _lint_floor(name)
    ]


def test_what_rules_import_is_a_short_list() -> None:
    """What one or two rules need is reached through its module: `path_condition.Flag`, `hardware.NEEDS`."""
    from mpguard.lint import interface

    names = [name for name in vars(interface) if not name.startswith("_") and name != "annotations"]
    assert len(names) <= 90


def test_floors_of_the_linter_import_one_way() -> None:
    assert _upward(_graph()) == []
    facts = "mpguard.lint.facts"
    wrong = {f"{facts}.syntax.index": {f"{facts}.program.view"}, f"{facts}.program.view": {f"{facts}.file"}}
    assert len(_upward(wrong)) == 2, "the test can fail"


@pytest.mark.parametrize("door", DOORS, ids=DOORS.values())
def test_a_door_exists_and_is_needed(door: tuple[str, str]) -> None:
    low, high = door
    assert high in set(_imports(low))
    with pytest.raises(graphlib.CycleError):
        _check_order({**_graph(), low: _graph()[low] | {high}})


def _exported(module: str) -> list[str]:
    """What is in `__all__` of a module."""
    for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.startswith("mpguard_plugins.")))
def test_plugins_import_public_names_only(name: str) -> None:
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.Import) and any(alias.name.startswith("mpguard.") for alias in node.names))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mpguard":
            assert node.module in PUBLIC, f"{name} imports {node.module}; public are {', '.join(PUBLIC)}"
            private = {alias.name for alias in node.names} - set(_exported(node.module))
            assert not private, f"{name}: not in __all__ of {node.module}: {', '.join(private)}"


def _public_types(code: str) -> Iterator[str]:
    """Yield the public classes and type aliases that a module defines. A TypeVar stands for any type: it is none."""
    body = ast.parse(code).body
    for block in [node for node in body if isinstance(node, ast.If)]:
        body += [*block.body, *block.orelse]
    for node in body:
        names: list[str] = []
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).endswith("TypeAlias"):
            names = [ast.unparse(node.target)]
        elif type(node).__name__ == "TypeAlias":  # `type X = ...`, from Python 3.12
            names = [ast.unparse(node).split()[1].partition("[")[0]]
        yield from (name for name in names if re.match("[A-Z][a-z]|[A-Z]+[a-z]", name))


def _defined_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the types that several modules define under one name, with those modules."""
    seen: dict[str, list[str]] = {}
    for module, code in sources.items():
        for name in dict.fromkeys(_public_types(code)):
            seen.setdefault(name, []).append(module)
    return {name: modules for name, modules in seen.items() if len(modules) > 1}


def test_the_name_of_a_class_or_type_alias_means_one_thing() -> None:
    """Two public types of one name would be taken for each other."""
    sources = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items() if ".rules." not in name}
    assert _defined_twice(sources) == {}  # a rule is one class, named as its file


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("class Spans: ...", ["Spans"]),
        ("Spans = list[int]", ["Spans"]),
        ("Spans: TypeAlias = list[int]", ["Spans"]),
        ("if TYPE_CHECKING:\n    Spans = int | None", ["Spans"]),
        ("SPANS = (1, 2)\n_Spans = list[int]\nResult = TypeVar('Result')\nspans = []", []),
    ],
)
def test_types_are_found(code: str, found: list[str]) -> None:
    assert list(_public_types(code)) == found
    assert set(_defined_twice({"one": code, "other": code})) == set(found)


_GPU_TESTS = sorted((REPOSITORY / "tests" / "gpu").glob("*.py"))


@pytest.mark.parametrize("path", _GPU_TESTS, ids=lambda path: path.stem)
def test_what_a_gpu_test_imports_exists(path: Path) -> None:
    """Without a GPU such a file is skipped before its imports are tried, so that a rename would go unnoticed."""
    pytest.importorskip("torch")
    own = {"mpguard", "mpguard_plugins", *(each.stem for each in (REPOSITORY / "tests" / "support").glob("*.py"))}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in own:
            module = importlib.import_module(node.module)
            for name in (each.name for each in node.names):
                submodule = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}")
                assert hasattr(module, name) or submodule, f"line {node.lineno}: {node.module} has no {name}"


def test_modules_of_tests_skip_where_a_framework_is_missing() -> None:
    """`make test-lint` has none: a module that imports one without `pytest.importorskip` ends the whole run."""
    names = {"torch", "accelerate", "deepspeed", "transformers", "torchao", "peft", "lightning"}
    left_out = {"gpu", "nodes"}  # `norecursedirs` of pyproject.toml
    for path in (each for each in sorted(TESTS.rglob("test_*.py")) if not left_out & set(each.parts)):
        for statement in ast.parse(path.read_text("utf-8")).body:
            if "importorskip" in ast.dump(statement):
                break
            found = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            found += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            assert not names & {each.partition(".")[0] for each in found}, path


def test_only_tests_that_start_deepspeed_compile_its_operator() -> None:
    """A test of a rule must not wait for a compiler: `pytest -k MPG201` on a new machine is a matter of seconds."""
    needed = {
        path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py") if deepspeed_operator.needed_by(path)
    }
    assert {"runtime/test_frameworks.py", "nn/fp8/test_resume.py", "runtime/proof/test_step.py"} <= needed
    assert not any(name.startswith(("lint/", "core/", "policy/", "server/")) for name in needed)


#: Where something of a library is replaced, and why that is in order; all else is in the table of `core/patches.py`.
REPLACED = {
    ("core/patches.py", "setattr"): "applies the patches of part OWN",
    ("runtime/patches/fit.py", "setattr"): "applies all other patches",
    ("runtime/patches/torch_optimizer_conversion.py", "step"): "in the patch of `Optimizer._patch_step_function`",
    ("nn/fp8/convert.py", "__class__"): "a layer of the model becomes an FP8 layer, as the policy asks",
    ("nn/fp8/experts.py", "__class__"): "experts of the model become FP8 experts",
    ("nn/grad_scaler.py", "__class__"): "checks the patch of `GradScaler.update` before",
    ("runtime/exit_hooks.py", "excepthook"): "a hook that Python documents",
    ("runtime/patches/import_hooks.py", "__loader__"): "the import system's own attribute of a module",
    ("runtime/containment.py", "__traceback__"): "of an exception, to leave out own frames",
    ("nn/compile.py", "recompile_limit"): "an option of torch that is for its users",
    ("nn/compile.py", "compile_threads"): "an option of torch that is for its users",
    ("doctor/probe.py", "allow_tf32"): "an option, in a process of its own",
    ("runtime/launch/worker.py", "argv"): "the script gets its own arguments",
    ("server/start.py", "stdout"): "nothing but messages may be written to it",
    ("cli/__init__.py", "setattr"): "a stream that is closed",
}


def _replacements(code: str) -> Iterator[str]:
    """Yield the attributes that a file sets of what it has imported, and those with two underscores of anything."""
    tree = ast.parse(code)
    imports = [each for each in ast.walk(tree) if isinstance(each, (ast.Import, ast.ImportFrom))]
    own = {"mpguard", "mpguard_plugins"}
    libraries = {
        (alias.asname or alias.name).partition(".")[0]
        for each in imports
        if (each.module if isinstance(each, ast.ImportFrom) else each.names[0].name or "").partition(".")[0] not in own
        for alias in each.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            owner = node.args[0]
            if isinstance(owner, ast.Name) and owner.id in {*libraries, "owner", "kind"}:
                yield "setattr"
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if not isinstance(each, ast.Attribute):
                    continue
                root: ast.expr = each
                while isinstance(root, ast.Attribute):
                    root = root.value
                of_library = isinstance(root, ast.Name) and root.id in libraries
                of_class = isinstance(root, ast.Call) and getattr(root.func, "id", "") == "type"
                dunder = each.attr.startswith("__") and each.attr not in ("__name__", "__wrapped__", "__doc__")
                if of_library or of_class or dunder:
                    yield each.attr


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os\nos._exit = leave", ["_exit"]),
        ("from torch import nn\nnn.Module.forward = forward", ["forward"]),
        ("import sys\nsys.excepthook, sys.exit = hook, leave", ["excepthook", "exit"]),
        ("def swap(scaler, kind): scaler.__class__ = kind\ntype(kind).step = kind", ["__class__", "step"]),
        ("from mpguard.core import patches\npatches.known = 1\nself.step = 2", []),
    ],
)
def test_replacements_are_found(code: str, found: list[str]) -> None:
    assert sorted(_replacements(code)) == sorted(found)


def test_nothing_of_a_library_is_replaced_outside_of_the_table_of_patches() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        if "lint" not in path.relative_to(PACKAGE).parts
        for name in _replacements(path.read_text(encoding="utf-8"))
    }
    assert found == REPLACED.keys()
