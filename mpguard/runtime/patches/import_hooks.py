"""Calling something right after a module has been imported, without importing it.

Patches are made in the defining module as it comes in, before anybody can have taken a name out of
it. A module that is there already is served at once.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

_waiting: dict[str, list[Callback]] = {}


def after(name: str, callback: Callback) -> None:
    """Calls `callback(module)` once the module `name` has been imported; now, where it has been."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    _waiting.setdefault(name, []).append(callback)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find; only the loader of a waited-for module is wrapped."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            found = finder.find_spec(fullname, path, target) if finder is not self else None
            if found is not None and found.loader is not None:
                found.loader = _Loader(found.loader, fullname)
                return found
        return None


class _Loader(importlib.abc.Loader):
    """A loader that calls back when the module has run. Everything else is the real loader's."""

    def __init__(self, real: Any, name: str) -> None:
        self._real, self._name = real, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._real, attribute)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._real.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._call(module)

    def get_code(self, name: str) -> CodeType | None:
        """`python -m NAME` takes the code and runs it itself: a copy of the module is made for the callbacks."""
        code: CodeType | None = self._real.get_code(name)
        if code is not None and self._name in _waiting:
            spec = importlib.util.spec_from_loader(name, self._real)
            assert spec is not None
            copy = importlib.util.module_from_spec(spec)
            self._real.exec_module(copy)
            self._call(copy)
        return code

    def _call(self, module: ModuleType) -> None:
        while self._name in _waiting:  # a callback may bring another for the same module
            for callback in _waiting.pop(self._name):
                callback(module)
