"""Load extensions: import every module of the packages that entry points name.

An entry point of `mpguard.plugins`, `mpguard.recipes` or `mpguard.rules` names a package; every module in it is
imported. So a plugin, a recipe or a rule is added by adding one file, in mpguard as in another distribution. A module
that fails to import raises an `ExtensionError` that names it, and not a warning: the result of a rule that silently
does not run looks like clean code.
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

from mpguard.core import distributions
from mpguard.core.errors import ExtensionError, MpguardError
from mpguard.core.settings import are_isolated

Result = TypeVar("Result")

GROUPS = ("mpguard.plugins", "mpguard.recipes", "mpguard.rules")


def load(group: str, own_only: bool = False) -> tuple[ModuleType, ...]:
    """Import every module of every package that `group` names; once per process.

    mpguard's own packages come first, so that a name clash is an error of the other package; the others are sorted by
    name. own_only: leave out the packages of other distributions; under `settings.isolated()` they always are.
    """
    return _load(group, own_only or are_isolated())


@functools.cache
def _load(group: str, own_only: bool) -> tuple[ModuleType, ...]:
    modules: list[ModuleType] = []
    found = distributions.entry_points(group)
    if all(entry.distribution != "mpguard" for entry in found):
        raise ExtensionError(
            f"the mpguard in {Path(__file__).parents[2]} is not installed for {sys.executable}: without its entry "
            f"points ({group}) it cannot find its own plugins, recipes and rules; install it (`pip install .` in its "
            "repository)"
        )
    for entry in sorted(found, key=lambda each: (each.distribution != "mpguard", each.name, each.value)):
        if own_only and entry.distribution != "mpguard":
            continue
        modules += walk(entry.value, f"entry point `{entry.name}` ({group}, of {entry.distribution})")
    return tuple(modules)


def walk(package: str, origin: str) -> list[ModuleType]:
    """Import a package or module and all modules below it. Raises `ExtensionError`, which names the one that fails.

    origin: where the package's name is from, for the message.
    """
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


def call_extension(what: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of a function of an extension.

    what: the extension, such as `plugin te`. Raises an `ExtensionError` that names the extension and the function
    where the function raises anything but an `MpguardError`.
    """
    try:
        return function(*arguments)
    except MpguardError:
        raise
    except Exception as error:
        failed = f"`{function.__name__}` of {function.__module__} fails: {type(error).__name__}: {error}"
        raise ExtensionError(f"{what}: {failed}") from error
