"""Collectives of this process, recorded where all of them pass: torch's dispatcher.

DDP's reducer and its built-in hooks are C++, functions may have been imported before mpguard was active, and compiled
code calls neither: a wrapper of `torch.distributed.all_reduce` sees none of these. A kernel in front of the real ones
(`BackendSelect`) sees each call with its tensors, and hands it on unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

log = logging.getLogger("mpguard")

#: Operators that reduce, and operators that only move tensors: those of gradients can be summed by hand afterwards.
#: With each one the position of the argument that holds what this rank contributes.
REDUCING = {
    "allreduce_": 0, "allreduce_coalesced_": 0, "reduce_": 0, "reduce_scatter_": 1, "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}  # fmt: skip
MOVING = {
    "allgather_": 1, "_allgather_base_": 1, "allgather_coalesced_": 1, "allgather_into_tensor_coalesced_": 1,
    "gather_": 1, "alltoall_": 1, "alltoall_base_": 1, "send": 0,
}  # fmt: skip

#: Modules that reduce gradients, and nothing else of more than one element.
ENGINES = ("torch.distributed.fsdp.", "torch.nn.parallel.distributed", "deepspeed.runtime.")

#: The engine of autograd calls what is below this function: hooks on gradients.
AUTOGRAD = "torch.autograd.graph"

#: What lies between autograd and a collective for activations: a `torch.autograd.Function`, a DTensor. A script may
#: reduce gradients that are DTensors, too.
FUNCTION, DTENSOR = "torch.autograd.function", "torch.distributed.tensor."

#: The calls of modules.
MODULES = "torch.nn.modules.module"

#: How many callers are searched for the origin of a collective.
DEPTH = 60


@dataclasses.dataclass(frozen=True)
class Collective:
    """One call. It is passed to the listener while it happens, and must not be kept: it holds tensors.

    name: of the operator. tensors: floating-point tensors of more than one element that this rank contributes. group:
    the name of the process group. origin: who called it, see `origin`. outputs: of a reduce-scatter, the tensors that
    get this rank's part of the sums. integers: other tensors that this rank contributes. single: floating-point
    tensors of one element, mostly losses and metrics.
    """

    name: str
    tensors: list[Any]
    group: str
    origin: str
    outputs: list[Any] = dataclasses.field(default_factory=list)
    integers: list[Any] = dataclasses.field(default_factory=list)
    single: list[Any] = dataclasses.field(default_factory=list)

    @property
    def reduces(self) -> bool:
        """False if the tensors are only moved."""
        return self.name in REDUCING

    @property
    def is_sent_to_one(self) -> bool:
        """True if one other rank gets the tensors."""
        return self.name == "send"

    @property
    def is_exchanged(self) -> bool:
        """True if each rank gets its own part of the tensors."""
        return self.name.startswith("alltoall")


#: The listener whose kernels are registered: torch takes one kernel for an operator.
_listening: CollectiveListener | None = None


class CollectiveListener:
    """Calls a function for each collective between `start` and `stop`, or until another one starts."""

    def __init__(self, record: Callable[[Collective], None]) -> None:
        self._record = record
        self._library: Any = None
        self._inside = threading.local()

    def start(self) -> None:
        """Register a kernel for each operator. Needs torch; without c10d there is nothing to listen to.

        Where other code has registered such a kernel, nothing is recorded, and reductions are not observed.
        """
        global _listening
        import torch
        import torch.distributed as dist
        from torch import library as torch_library

        if not dist.is_available() or self._library is not None:
            return
        if _listening is not None:
            _listening.stop()
        make: Any = torch_library.Library  # it has no annotations
        library = make("c10d", "IMPL")
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        try:
            for name, position in {**REDUCING, **MOVING}.items():
                packet = getattr(torch.ops.c10d, name, None)
                if packet is not None:
                    kernel = self._kernel(packet.default, below, position, name)
                    library.impl(name, kernel, "BackendSelect", with_keyset=True)
        except RuntimeError as error:
            library._destroy()
            log.warning("mpguard: collectives cannot be recorded, so that reductions are not observed: %s", error)
            return
        self._library, _listening = library, self

    def stop(self) -> None:
        """Remove the kernels."""
        global _listening  # noqa: PLW0603  as above
        if self._library is not None:
            self._library._destroy()
            self._library = None
            _listening = None

    def _kernel(self, operator: Any, below: Any, position: int, name: str) -> Callable[..., Any]:
        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if not getattr(self._inside, "ignored", False):
                try:
                    self._observe(args, position, name)
                except Exception as error:
                    log.debug("mpguard: a collective was not recorded: %r", error)
            return operator.redispatch(keyset & below, *args, **kwargs)

        return kernel

    def _observe(self, args: tuple[Any, ...], position: int, name: str) -> None:
        found = list(_leaves(args[position]))
        single = [each for each in found if each.numel() == 1 and each.is_floating_point()]
        several = [each for each in found if each.numel() > 1]
        if several or single:
            tensors = [each for each in several if each.is_floating_point()]
            integers = [each for each in several if not each.is_floating_point()]
            outputs = list(_leaves(args[0])) if "reduce_scatter" in name else []
            self._record(Collective(name, tensors, _group_name(args), origin(), outputs, integers, single))

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Record no collectives of this thread inside the block: those of mpguard reduce no gradients."""
        self._inside.ignored = True
        try:
            yield
        finally:
            self._inside.ignored = False


def number_of_calls() -> int | None:
    """Return how many collectives the default process group has called: as many on ranks that are at the same step.

    Uneven data, with `Join`, gives ranks other numbers of steps. None if the group does not count.
    """
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    return None


def origin() -> str:
    """Return who calls a collective, from the callers of this function.

    `engine`: FSDP, DeepSpeed, or DDP's Python code. `hook`: a hook on gradients that autograd called, or DDP's reducer
    in C++. `function`: the forward or backward of a `torch.autograd.Function`, or the backward of a DTensor, which
    reduces activations. `script`: anything else.
    """
    frame: FrameType | None = sys._getframe(1)
    activations = forward = False
    for _ in range(DEPTH):
        if frame is None:
            if threading.current_thread() is threading.main_thread():
                return "function" if forward else "script"
            return "function" if activations else "hook"  # autograd has threads of its own
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(ENGINES):
            return "engine"
        if module == MODULES:  # the engines call the model, too
            return "function" if forward else "script"
        if module == AUTOGRAD:
            return "function" if activations else "hook"
        if frame.f_code.co_name == "forward" and _is_function_forward(frame.f_code):
            module = FUNCTION
        forward = module == FUNCTION or (forward and not module.startswith(DTENSOR))
        activations = activations or module.startswith((FUNCTION, DTENSOR))
        frame = frame.f_back
    return "script"


@functools.lru_cache(maxsize=1024)
def _is_function_forward(code: CodeType) -> bool:
    """Return True for the code of a `torch.autograd.Function.forward`: since torch 2.14 its caller has no frame."""
    import torch

    classes: list[Any] = [torch.autograd.Function]
    for each in classes:
        classes += each.__subclasses__()
        found: Any = each.forward
        while found is not None:  # `torch.amp.custom_fwd` wraps it
            if getattr(found, "__code__", None) is code:
                return True
            found = getattr(found, "__wrapped__", None)
    return False


def _group_name(args: tuple[Any, ...]) -> str:
    """Return the name of the process group among the arguments of an operator; empty if there is none."""
    import torch
    import torch.distributed as dist

    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return str(dist.ProcessGroup.unbox(each).group_name)
    return ""


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors of an argument: a tensor, a list, or a list of lists."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    elif value is not None:
        yield value
