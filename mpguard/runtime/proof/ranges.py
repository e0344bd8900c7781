"""`Ranges`: ranges of the profiler around the calls of modules, and around FP32 regions, in which matmuls run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpguard.runtime.containment import contained_hook
from mpguard.runtime.proof import trace
from mpguard.runtime.proof.autocast_regions import Autocast, EnteredRegion
from mpguard.runtime.proof.products import short

if TYPE_CHECKING:
    from torch import nn


#: Functions that get each module that no other module calls, before its call, while ranges are open.
outermost_listeners: list[Callable[[Any], None]] = []


class Ranges:
    """Opens a range of the profiler around each call of a module, with global hooks, and around regions of the script.

    called: the classes of the modules that were called, by id. named: False once compiled code was entered: dynamo
    traces hooks of modules.
    """

    def __init__(self, on_call: Callable[..., None], *, named: bool = True) -> None:
        """Create ranges. on_call: gets each call of a module; `outermost` is True if no other module calls it."""
        self.called: dict[int, str] = {}
        self.named = named
        self._on_call = on_call
        self._handles: list[Any] = []
        self._open = threading.local()
        #: Types of the devices whose autocast was on since the last backward pass.
        self._autocast: set[str] = set()
        self._regions: set[tuple[EnteredRegion, int]] = set()
        self._threads: set[int] = set()

    def install(self) -> None:
        """Register the hooks, once."""
        if self._handles or not self.named:
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

    def leave_modules(self) -> None:
        """Remove the hooks for good, and close the ranges of modules that are open in this thread."""
        self.forget()
        self.named = False
        self.reopen([name for name in self.close() if not name.startswith(trace.MODULE)])

    def close(self) -> list[str]:
        """Close the ranges that are open in this thread, and return their names."""
        stack = self._stack()
        names = [name for name, _ in stack]
        while stack:
            stack.pop()[1].__exit__(None, None, None)
        return names

    def reopen(self, names: list[str]) -> None:
        """Open the ranges again that `close` has closed."""
        for name in names:
            self._push(name)

    def pass_ended(self) -> None:
        """Forget the autocast regions of the forward pass."""
        self._autocast.clear()

    def enter_autocast(self, region: Any, *, inside: bool) -> None:
        """Open a range if a region switches autocast off. inside: True if it was on.

        After a region in which it was on, too; else nothing shows that the script wants it for a part only.
        """
        found = EnteredRegion(region.device, short(region.fast_dtype), bool(region._enabled), self._is_in_module())
        self._regions.add((found, threading.get_ident()))
        if region._enabled:
            self._autocast.add(region.device)
        elif inside or region.device in self._autocast:
            self._push(f"{trace.WITHOUT_AUTOCAST}{id(region)}")

    def leave_autocast(self, region: Any) -> None:
        """Close the range of a region, if it has one."""
        self._pop(f"{trace.WITHOUT_AUTOCAST}{id(region)}")

    def autocast(self) -> Autocast:
        """Return the autocast regions that were entered."""
        with_region = {thread for region, thread in self._regions if region.enabled}
        elsewhere = bool(with_region and self._threads - with_region)
        return Autocast(sorted({region for region, _ in self._regions}), elsewhere)

    @contextlib.contextmanager
    def evaluation(self, module: nn.Module) -> Iterator[None]:
        """Return a context manager for the call of a compiled module, which runs no hooks: a range of evaluation."""
        name = f"{trace.EVALUATION}{id(module)}"
        if not is_evaluated(module):
            yield
            return
        self._push(name)
        try:
            yield
        finally:
            self._pop(name)

    def _push(self, name: str) -> None:
        from torch._C._profiler import _RecordFunctionFast

        opened = _RecordFunctionFast(name)
        opened.__enter__()
        self._stack().append((name, opened))

    def _pop(self, wanted: str) -> None:
        """Close a range, and those inside of it; none if it is not open."""
        stack = self._stack()
        if not any(name == wanted for name, _ in stack):
            return  # it was entered before the hooks were registered
        while stack:
            name, opened = stack.pop()
            opened.__exit__(None, None, None)
            if name == wanted:
                return

    def _stack(self) -> list[tuple[str, Any]]:
        if not hasattr(self._open, "ranges"):
            self._open.ranges = []
        return self._open.ranges  # type: ignore[no-any-return]

    def _is_in_module(self) -> bool:
        """True if a module is being called in this thread."""
        return any(name.startswith(trace.MODULE) for name, _ in self._stack())

    def _note_thread(self) -> None:
        """Record that a module was called with gradients in this thread."""
        import torch

        if torch.is_grad_enabled():
            self._threads.add(threading.get_ident())

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self.called[id(module)] = type(module).__name__
        outermost = not self._is_in_module()
        self._on_call(outermost=outermost)
        if outermost:
            self._note_thread()
            for listener in outermost_listeners:
                listener(module)
        if outermost and is_evaluated(module):
            self._push(f"{trace.EVALUATION}{id(module)}")
        self._push(f"{trace.MODULE}{id(module)}")

    def _exit(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._pop(f"{trace.MODULE}{id(module)}")
        if self._stack() and self._stack()[-1][0] == f"{trace.EVALUATION}{id(module)}":
            self._pop(f"{trace.EVALUATION}{id(module)}")


def is_evaluated(module: nn.Module) -> bool:
    """True if a module is called without gradients although it is trained: in a validation, or to generate."""
    import torch

    return not torch.is_grad_enabled() and any(own.requires_grad for own in module.parameters())
