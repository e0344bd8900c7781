"""`ModuleRanges`: a range of the profiler around each call of a module, by which the account knows where it ran."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpguard.runtime.containment import contained_hook
from mpguard.runtime.proof import trace

if TYPE_CHECKING:
    from torch import nn


class ModuleRanges:
    """Opens a range of the profiler around each call of a module, with global hooks.

    called: the classes of the modules that were called, by id. Not for compiled code: dynamo traces hooks of modules.
    """

    def __init__(self, on_call: Callable[..., None]) -> None:
        """Create ranges. on_call: is told each call, and by `outermost` if no other module calls it."""
        self.called: dict[int, str] = {}
        self._on_call = on_call
        self._handles: list[Any] = []
        self._open = threading.local()

    def install(self) -> None:
        """Register the hooks, once."""
        if self._handles:
            return
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self._handles = [
            register_module_forward_pre_hook(contained_hook(self._enter, "the account of modules")),
            register_module_forward_hook(contained_hook(self._exit, "the account of modules"), always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks, and close the ranges that are open in this thread."""
        self.forget()
        self.close()

    def forget(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> list[int]:
        """Close the ranges that are open in this thread, and return their modules."""
        stack = self._stack()
        modules = [number for number, _ in stack]
        while stack:
            stack.pop()[1].__exit__(None, None, None)
        return modules

    def reopen(self, modules: list[int]) -> None:
        """Open the ranges again that `close` has closed."""
        for number in modules:
            self._push(number)

    def _push(self, number: int) -> None:
        from torch._C._profiler import _RecordFunctionFast

        opened = _RecordFunctionFast(f"{trace.MODULE}{number}")
        opened.__enter__()
        self._stack().append((number, opened))

    def _stack(self) -> list[tuple[int, Any]]:
        if not hasattr(self._open, "ranges"):
            self._open.ranges = []
        return self._open.ranges  # type: ignore[no-any-return]

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self.called[id(module)] = type(module).__name__
        self._on_call(outermost=not self._stack())
        self._push(id(module))

    def _exit(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        stack = self._stack()
        if not any(number == id(module) for number, _ in stack):
            return  # it was entered before the hooks were registered
        while stack:
            number, opened = stack.pop()
            opened.__exit__(None, None, None)
            if number == id(module):
                return
