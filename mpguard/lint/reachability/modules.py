"""The modules of a project as Python's own parser sees them: what each binds, and which file an import finds.

Facts parse only what rules need. To prove that something is missing, all of a file is needed.
"""

# Many paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH100, PTH118, PTH119, PTH120

from __future__ import annotations

import ast
import functools
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.project import packages, summaries, tree
from mpguard.lint.source.files import NOTEBOOK, is_ignored
from mpguard.lint.source.source import Source
from mpguard.lint.source.text import Unparsable

#: The size in bytes above which a file is not parsed.
LARGEST = 512 << 10
#: Code that may bind names which are not in it.
_BINDS = lazy_pattern(
    r"(?<![\w.])(?:exec|execfile|globals|locals)\(|\bvars\(\)|\bbuiltins\b|\b__builtins__\b|\bsys\.modules\b"
)
#: Code that may set attributes whose names are not in it, or compute them.
_SETS = lazy_pattern(r"\b__getattr(?:ibute)?__\b|\b__dict__\b|\bvars\(|\bsetattr\(\s*[\w.]+\s*,\s*[^\s\"']|\bexec\(")
_MAIN = lazy_pattern(r"^if[ \t]*\(?__name__[ \t]*==", re.M)
#: Modules that a build writes.
_BUILT = lazy_pattern(r"version|_pb2|^_|_ext\b|_cuda|_C$|generated|(?:^|_)build")
#: Code of a package that searches its modules in other folders, or makes them.
_FINDS_MODULES = lazy_pattern(r"__path__|\bextend_path\b|\bsys\.(?:modules|meta_path)\b|\bexec\(|\b__getattr__\b")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class ParsedModule:
    """A file as a tree.

    is_whole: all names that it binds are in its code. sets_all: all attributes that it sets are.
    """

    def __init__(self, path: str, text: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tree = ast.parse(text)
        self.path, self.text = path, text
        self.bound = {name: [*nodes] for name, nodes in bound_in(self.tree).items()}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Global):
                for name in node.names:
                    self.bound.setdefault(name, []).append(node)
        self.is_whole = "*" not in self.bound and _BINDS.search(text) is None
        self.sets_all = _SETS.search(text) is None

    @functools.cached_property
    def attributes(self) -> frozenset[str]:
        """The names of the attributes that the file sets, of any object, and its strings, which may be such names."""
        found = set[str]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
        return frozenset(found)


@tracked_fs.cached_per_run
def bound_in(scope: ast.AST) -> dict[str, list[ast.AST]]:
    """Return the names that a module, class or function binds, each with the nodes that bind it.

    The parameters of a lambda and the targets of a comprehension count. A star import binds `*`.
    """
    found: dict[str, list[ast.AST]] = {}

    def bind(name: str | None, node: ast.AST) -> None:
        if name:
            found.setdefault(name, []).append(node)

    def bind_parameters(given: ast.arguments) -> None:
        for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
            if each is not None:
                bind(each.arg, each)

    waiting: list[tuple[ast.AST, ast.AST]] = []
    if isinstance(scope, _FUNCTIONS):
        bind_parameters(scope.args)
    if not isinstance(scope, ast.Module):
        for parameter in getattr(scope, "type_params", ()):
            bind(parameter.name, parameter)
    waiting += [(each, each) for each in scope.body]  # type: ignore[attr-defined]
    while waiting:
        node, statement = waiting.pop()
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            bind(node.name, node)
            inner = [*node.decorator_list]
            inner += [*node.bases, *(each.value for each in node.keywords)] if isinstance(node, ast.ClassDef) else [
                *node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)
            ]  # fmt: skip
            waiting += [(each, statement) for each in inner]
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bind(node.id, statement)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                bind(alias.asname or alias.name.partition(".")[0], node)
        elif isinstance(node, ast.Lambda):
            bind_parameters(node.args)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            bind(node.name, node)
        elif isinstance(node, ast.MatchMapping):
            bind(node.rest, node)
        waiting += [(each, statement) for each in ast.iter_child_nodes(node)]
    return found


@tracked_fs.cached_per_run
def is_program(module: ParsedModule) -> bool:
    """True for a notebook, and for a file with a main part or an import of a module of the project.

    Another one may be a snippet, whose `model` and `loader` are bound by its reader.
    """
    if module.path.endswith(NOTEBOOK) or _MAIN.search(module.text):
        return True
    return any(
        find("." * each.level + (each.module or ""), module.path) is not None
        if isinstance(each, ast.ImportFrom)
        else any(find(alias.name, module.path) is not None for alias in each.names)
        for each in ast.walk(module.tree)
        if isinstance(each, (ast.Import, ast.ImportFrom))
    )


@tracked_fs.cached_per_run
def parsed(path: str, text: str) -> ParsedModule | None:
    """Return a file as a tree; None if Python does not parse it."""
    try:
        return ParsedModule(path, text)
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return None


def in_project(path: str) -> bool:
    """True if a file is in a project: code outside of one may be a part of a program."""
    return tree.is_project(tree.top_of(Path(path).absolute().parent))


def find(module: str, from_path: str) -> ParsedModule | None:
    """Return the module of a project that an import finds, where no other one can be meant."""
    found = _searched(module, from_path)
    return _below(*found) if found is not None else None


def is_missing(module: str, from_path: str) -> bool:
    """True if a package of the project, which no other one can be, has no module that an import names.

    A file that sets `sys.path` may have added a folder in which there is one; and where folders around it have a
    package of this name too, `python -m` may find that one.
    """
    found = _searched(module, from_path)
    if found is None:
        return False
    base, parts = found
    if not module.startswith("."):
        top = str(tree.top_of(Path(from_path).absolute().parent))
        others = (each for each in _folders_around(base, top) if _has(each, parts[0]))
        if "sys.path" in text_of(from_path) or any(others):
            return False
    for part in parts:
        inner = os.path.join(base, part)
        init = os.path.join(base, "__init__.py")
        if tracked_fs.is_file(os.path.join(inner, "__init__.py")):
            base = inner
            continue
        return (
            tracked_fs.is_file(init)
            and not tracked_fs.is_file(f"{inner}.py")
            and not _may_be_built(base, part)
            and _FINDS_MODULES.search(text_of(init)) is None
            and not is_ignored(inner)
            and not is_ignored(f"{inner}.py")
        )
    return False


@tracked_fs.cached_per_run
def _searched(module: str, from_path: str) -> tuple[str, list[str]] | None:
    """Return the folder in which an import of a project is searched, and the names below it; None if it is unclear.

    Relative imports are certain, those of the package that the file is in, those of a script's own folder, those of the
    package that the project builds, and, if the script sets `sys.path`, those of a folder around it that is the only
    one with such a module.
    """
    file = os.path.abspath(from_path)
    folder = os.path.dirname(file)
    top = str(tree.top_of(Path(folder)))
    dots = len(module) - len(module.lstrip("."))
    parts = [part for part in module[dots:].split(".") if part]
    if dots:
        base = folder
        for _ in range(dots - 1):
            base = os.path.dirname(base)
        if not tracked_fs.is_file(os.path.join(base, "__init__.py")):
            return None
    else:
        packages = list(_packages(folder))
        if packages and os.path.basename(packages[-1]) == parts[0]:
            base = os.path.dirname(packages[-1])
        elif not _is_elsewhere(parts[0]) and (not packages or _is_script(file)):
            base = folder
            if not _has(base, parts[0]):
                around = [each for each in _folders_around(folder, top) if _has(each, parts[0])]
                if len(around) != 1 or not ("sys.path" in text_of(file) or _is_built(around[0], parts[0], top)):
                    return None
                base = around[0]
        else:
            return None
    return (base, parts) if f"{base}{os.sep}".startswith(f"{top}{os.sep}") else None


def _has(folder: str, name: str) -> bool:
    return any(tracked_fs.exists(os.path.join(folder, each)) for each in (f"{name}.py", name))


def _is_built(folder: str, name: str, top: str) -> bool:
    """True if a package is the one at the top of a project that builds it."""
    package = os.path.join(folder, name, "__init__.py")
    return folder == top and tracked_fs.is_file(package) and packages.is_installable(Path(top))


def _folders_around(folder: str, top: str) -> Iterator[str]:
    while folder != top and folder.startswith(f"{top}{os.sep}"):
        folder = os.path.dirname(folder)
        yield folder


def _is_elsewhere(name: str) -> bool:
    """True for a package of Python's own, or a library: which one is imported depends on how the file is run."""
    return name in summaries.LIBRARIES or name in sys.stdlib_module_names


def _is_script(file: str) -> bool:
    return _MAIN.search(text_of(file)) is not None


def _packages(folder: str) -> Iterator[str]:
    """Yield the folders of the packages that a folder is in, innermost first."""
    while tracked_fs.is_file(os.path.join(folder, "__init__.py")):
        yield folder
        folder = os.path.dirname(folder)


def _below(base: str, parts: list[str]) -> ParsedModule | None:
    for place, part in enumerate(parts):
        inner = os.path.join(base, part)
        is_last = place == len(parts) - 1
        if tracked_fs.is_file(os.path.join(inner, "__init__.py")):
            base = inner
        elif tracked_fs.is_file(f"{inner}.py"):
            return _read(f"{inner}.py") if is_last else None
        elif not is_last and tracked_fs.exists(inner):  # a package without `__init__`
            base = inner
        else:
            return None  # the repository may leave it out, or a build may write it
    return _read(os.path.join(base, "__init__.py"))


def _may_be_built(folder: str, name: str) -> bool:
    """True if a module that is not there may be a folder without `__init__`, an extension, or made by a build.

    A package with Cython code, or with a setup.py for extensions, is built into a folder of its name in itself.
    """
    if _BUILT.search(name) or tracked_fs.exists(os.path.join(folder, name)):
        return True
    if any(each.partition(".")[0] == name for each in tracked_fs.list_names(folder, ("",))):
        return True
    return name == os.path.basename(folder) and (
        bool(tracked_fs.list_names(folder, (".pyx",))) or "ext_modules" in text_of(os.path.join(folder, "setup.py"))
    )


def has_submodule(package: ParsedModule, name: str) -> bool:
    """True if a package may have a submodule."""
    folder = os.path.dirname(package.path)
    return os.path.basename(package.path) == "__init__.py" and (
        tracked_fs.is_file(os.path.join(folder, f"{name}.py")) or _may_be_built(folder, name)
    )


def _read(path: str) -> ParsedModule | None:
    """Return the module of a file; None if it cannot be read, or does not parse."""
    try:
        data = tracked_fs.read_up_to(path, LARGEST)
        return parsed(path, Source(data, path).text) if data is not None else None
    except (OSError, Unparsable):
        return None


def text_of(path: str) -> str:
    """Return the text of a file; empty for one that cannot be read."""
    try:
        return (tracked_fs.read_up_to(path, LARGEST * 8) or b"").decode("utf-8", "replace")
    except OSError:
        return ""
