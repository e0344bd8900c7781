"""Callbacks that run right after a module has been imported, without importing it.

Patches are applied to the defining module while it is being imported, before another module can import a
name from it. For a module that has been imported already, the callback runs at once.
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

_callbacks: dict[str, list[Callback]] = {}


def after(name: str, callback: Callback) -> None:
    """Call `callback(module)` when the module `name` has been imported; at once if it has been already."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    _callbacks.setdefault(name, []).append(callback)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Delegates to the other finders, and wraps the loader of a module for which there are callbacks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _callbacks:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, fullname)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Runs the callbacks after the real loader has executed the module. Everything else is delegated to that loader."""

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
        """Return the code for `python -m NAME`, which executes it itself; the callbacks get a copy of the module."""
        code: CodeType | None = self._real.get_code(name)
        if code is not None and self._name in _callbacks:
            spec = importlib.util.spec_from_loader(name, self._real)
            assert spec is not None
            copy = importlib.util.module_from_spec(spec)
            self._real.exec_module(copy)
            self._call(copy)
        return code

    def _call(self, module: ModuleType) -> None:
        while self._name in _callbacks:  # a callback may register another one for the same module
            for callback in _callbacks.pop(self._name):
                callback(module)
