"""Extensions: entry point -> package -> its modules, walked.

An entry point of `mpguard.plugins`, `mpguard.recipes` or `mpguard.rules` names a package; every
module in it is imported. Adding a plugin, a recipe or a rule is one file and no other edit, for us
and for others. What fails to import is an `ExtensionError` that names it, never a warning: a rule
that silently does not run looks like clean code.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from mpguard.core.errors import ExtensionError, MpguardError
from mpguard.core.settings import are_isolated

Made = TypeVar("Made")

GROUPS = ("mpguard.plugins", "mpguard.recipes", "mpguard.rules")


def load(group: str, own_only: bool = False) -> tuple[ModuleType, ...]:
    """Imports every module of every package that `group` names; once per process.

    Ours come first, so that a clash is the other package's error; then by name.
    own_only: leave out what other distributions than mpguard bring; under `settings.isolated()` that is always so.
    """
    return _load(group, own_only or are_isolated())


@functools.cache
def _load(group: str, own_only: bool) -> tuple[ModuleType, ...]:
    import importlib.metadata  # 20 ms, for what not every run needs

    modules: list[ModuleType] = []
    found = [
        (entry.dist.name if entry.dist else "an unknown distribution", entry)
        for entry in importlib.metadata.entry_points(group=group)
    ]
    if all(distribution != "mpguard" for distribution, _ in found):
        raise ExtensionError(
            f"the mpguard in {Path(__file__).parents[2]} is not installed for {sys.executable}: without its entry "
            f"points ({group}) it knows none of its own; install it (`pip install .` in its repository)"
        )
    for distribution, entry in sorted(found, key=lambda f: (f[0] != "mpguard", f[1].name, f[1].value)):
        if own_only and distribution != "mpguard":
            continue
        modules += walk(entry.value, f"entry point `{entry.name}` ({group}, of {distribution})")
    return tuple(modules)


def walk(package: str, origin: str) -> list[ModuleType]:
    """Imports a package or module and all modules below it; `ExtensionError` names what fails."""
    root = _import(package, origin)
    modules = [root]
    for info in sorted(pkgutil.iter_modules(getattr(root, "__path__", []), f"{package}."), key=lambda i: i.name):
        modules += walk(info.name, origin)  # pkgutil.walk_packages swallows what a subpackage raises
    return modules


def _import(name: str, origin: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ExtensionError:
        raise
    except (Exception, SystemExit) as error:
        raise ExtensionError(f"{origin}: `{name}` does not import: {type(error).__name__}: {error}") from error


def asked(what: str, function: Callable[..., Made], *arguments: Any) -> Made:
    """What a function of an extension gives. `ExtensionError` names it where it raises what is no error of mpguard's.

    what: the extension, such as `plugin te`.
    """
    try:
        return function(*arguments)
    except MpguardError:
        raise
    except Exception as error:
        failed = f"`{function.__name__}` of {function.__module__} fails: {type(error).__name__}: {error}"
        raise ExtensionError(f"{what}: {failed}") from error
