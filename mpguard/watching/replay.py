"""The last batch of a model, and its replay: it names the first module with NaN or Inf, forward or backward.

The replay does not touch what is trained: it runs on the same weights, with copies of inputs and buffers and the random
numbers of that batch, and gradients are returned instead of being accumulated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from mpguard.nn.fp8.filters import plain_name
from mpguard.watching.containment import CONTAINMENT
from mpguard.watching.trace import (
    LOSS,
    Located,
    ReplayTrace,
    autocast_kinds,
    bad_kind,
    kind_in,
    on_gradient,
    ranges_of,
    short,
    tensors_of,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("mpguard")

#: Bytes of inputs, and of gradients of outputs, that are kept until the end of a step.
KEPT_BYTES = 64 * 2**20

#: Calls of a model that are kept of a step: its micro-batches.
KEPT_CALLS = 8

#: Why a replay, forward and backward, has found nothing.
FINITE = "the replay of the batch was finite"

#: Gradients that are finite, and so large that their norm is not: FP32 holds the squares of numbers below this.
EXPLODED, SQUARE_OVERFLOWS = "the gradients are finite, but too large for the sum of their squares in FP32", 1e18

#: Why a model of TorchScript has no replay.
SCRIPTED = "it has a ScriptModule, which takes no hooks"


class CapturedCall:
    """One call of a model: its inputs, the random numbers and the autocast state before it, gradients of its outputs.

    Inputs are held, not copied; a script that overwrites them before the step ends is not noticed.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        import torch

        self.module = weakref.ref(module)
        self.args, self.kwargs = args, kwargs
        self.random = torch.get_rng_state()
        self.device_random = _device_random()
        self.autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in autocast_kinds()]
        self.training = module.training
        self.gradients: dict[int, torch.Tensor] = {}
        self.first = False  # it was kept before the models of the optimizers were known
        self.scalar = False  # one of the outputs is a scalar: the loss, from which all gradients come

    def follow(self, outputs: Any) -> None:
        """Keep the gradients of the outputs when they are computed."""
        leaves = tensors_of(outputs)
        if len(leaves) == 1:  # nearly every model: nothing to choose from
            (leaf,) = leaves
            if leaf.requires_grad:
                self.scalar = leaf.numel() == 1
                if leaf.numel() * leaf.element_size() <= KEPT_BYTES:
                    on_gradient(leaf, functools.partial(self._keep, 0))
            return
        with_graph = [(index, leaf) for index, leaf in enumerate(leaves) if leaf.requires_grad]
        self.scalar = any(leaf.numel() == 1 for _, leaf in with_graph)
        kept = 0
        for index, leaf in with_graph:
            if self.scalar and leaf.numel() > 1:
                continue
            kept += leaf.numel() * leaf.element_size()
            if kept <= KEPT_BYTES:
                on_gradient(leaf, functools.partial(self._keep, index))

    def _keep(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # compiled code has outputs of which the loss uses only others
            self.gradients[index] = gradient.detach() if gradient.requires_grad else gradient


def _device_random() -> Any:
    """Return the random state of the current GPU; it is kept on the host, so that reading it does not wait."""
    import torch

    cuda: Any = torch.cuda
    return cuda.get_rng_state() if cuda.is_initialized() and not cuda.is_current_stream_capturing() else None


# -- capture -------------------------------------------------------------------------------------


class _Hook:
    """A hook of a model that a pickle of the model does not need mpguard for, and that its copies do not have."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __deepcopy__(self, _memo: Any) -> _Hook:
        return _Hook(_ignore)

    def __reduce__(self) -> Any:
        # Something of the standard library that takes any arguments and returns None.
        return getattr, (logging.getLogger("mpguard.watching.unpickled"), "debug")


def _ignore(*_args: Any) -> None:
    """Do nothing: what the hook of a copied model calls."""


class Captures:
    """Keeps the calls of the watched models since the last step."""

    def __init__(self) -> None:
        self.batches: list[CapturedCall] = []
        self.dropped = 0
        self.stale = False  # the step of the batches has ended; they are released when the next begins
        self.reason = ""  # why the batches of a watched model are not kept
        self.dtype = ""  # of autocast in the last call
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._closed = False

    def watch(self, root: nn.Module) -> None:
        """Keep the calls of a model from here on."""
        module = called_module(root)
        if module in self._watched:
            return
        self._watched.add(module)
        if _is_scripted(module):  # it takes no hooks
            self.reason = SCRIPTED
            return
        own: Any = module
        compiled = own.__dict__.get("_compiled_call_impl")
        if compiled is not None:  # compiled in place: hooks that are added now do not run
            own._compiled_call_impl = self._around(weakref.ref(module), compiled)
            return
        self._handles += [
            module.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            module.register_forward_hook(_Hook(self._after)),
        ]

    def _around(self, module: weakref.ref[nn.Module], compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(module(), args, kwargs)
            outputs = compiled(*args, **kwargs)
            self._after(module(), args, outputs)
            return outputs

        return call

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        import torch

        with CONTAINMENT.contained("the watch of a model's inputs"):
            if self._closed or module is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return
            if self.stale:
                self.clear()
            self._keep(CapturedCall(module, args, kwargs))

    def first_call(self, module: nn.Module) -> None:
        """Keep a call of any model in the first step, before the models of the optimizers are known.

        The hook is of this call only: it gets the arguments, keywords too, after the call.
        """
        import torch

        if self._closed or module in self._watched or _is_scripted(module) or torch.compiler.is_compiling():
            return
        batch = CapturedCall(module, (), {})
        batch.first = True

        def after(_own: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            handle.remove()
            with CONTAINMENT.contained("the watch of the first step"):
                batch.args, batch.kwargs = args, kwargs
                if torch.is_grad_enabled():
                    batch.follow(outputs)
                self._keep(batch)

        handle = module.register_forward_hook(after, with_kwargs=True)

    def _keep(self, batch: CapturedCall) -> None:
        """Keep a call, and drop the oldest where there are too many or too large ones."""
        self.dtype = short(batch.autocast[0][1]) if batch.autocast else ""
        if not self.batches:
            self.batches.append(batch)
            return
        size = sum(each.numel() * each.element_size() for each in tensors_of((batch.args, batch.kwargs)))
        room = KEPT_CALLS if size * KEPT_CALLS <= KEPT_BYTES else 1
        self.dropped += max(0, len(self.batches) + 1 - room)
        self.batches = [*self.batches, batch][-room:]

    def _after(self, module: Any, _args: Any, outputs: Any) -> None:
        import torch

        with CONTAINMENT.contained("the watch of a model's outputs"):
            if self.batches and self.batches[-1].module() is module and torch.is_grad_enabled():
                self.batches[-1].follow(outputs)

    def clear(self) -> None:
        """Release the batches of a step."""
        self.batches, self.dropped, self.stale = [], 0, False

    def close(self) -> None:
        """Keep no more calls, and take the hooks off the models."""
        self._closed = True
        self.clear()
        for handle in self._handles:
            handle.remove()


def called_module(root: Any) -> Any:
    """Return the module inside wrappers that is called eagerly: a compiled one, or the model itself."""
    while type(root).__name__ in ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"):
        root = root.module
    return root


def plain_module(module: Any) -> Any:
    """Return the model inside of all wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None) if type(module).__name__ == "OptimizedModule" else None
        inner = inner if inner is not None else called_module(module)
        if inner is module:
            return module
        module = inner


# -- replay --------------------------------------------------------------------------------------


def _is_scripted(module: Any) -> bool:
    """True for a module of `torch.jit.script` or `torch.jit.load`."""
    return any(base.__name__ == "RecursiveScriptModule" for base in type(module).__mro__)


def name_in_owner(module: nn.Module | None, found: str) -> str:
    """Return the name of a module inside the model that has it, if a script calls parts of a model (`vae.encode`)."""
    from mpguard.runtime.proof.models import models_of

    if module is None or found in (LOSS, "the batch"):
        return found
    for root in models_of(list(module.parameters())):
        name = next((name for name, own in root.named_modules() if own is module), "")
        if name:
            inside = "" if found == type(module).__name__ else f".{found}"
            return f"{type(root).__name__}.{plain_name(name)}{inside}"
    return found


def cannot_replay(module: nn.Module) -> str:
    """Return why a model cannot be replayed on one rank; empty if it can."""
    for own in module.modules():
        kind = type(own)
        if _is_scripted(own):
            return SCRIPTED
        if any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in kind.__mro__):
            return "its parameters are sharded (FSDP): a replay would wait for the other ranks"
        if kind.__name__ == "SyncBatchNorm":
            return "it has SyncBatchNorm: a replay would wait for the other ranks"
        if kind.__module__.startswith("transformer_engine"):
            return "it has layers of Transformer Engine: a replay would change their amax history"
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            return "its parameters are partitioned (ZeRO-3): a replay would wait for the other ranks"
        if hasattr(parameter, "device_mesh"):
            return "its parameters are distributed tensors: a replay would wait for the other ranks"
    return ""


def replay(batch: CapturedCall, *, bad_loss: bool = False) -> Located:
    """Run a batch again with hooks on all modules, and return the first that makes NaN or Inf from finite inputs.

    bad_loss: the loss of the batch is not finite, so it is made in the forward pass.
    """
    model = plain_module(batch.module())
    if model is None:
        return Located(None, reason="the model no longer exists", replayed=False)
    reason = cannot_replay(model)
    if reason:
        return Located(None, reason=f"the batch cannot be replayed: {reason}", replayed=False)
    damaged = bad_weights(model)
    if damaged:
        # Bad gradients spread from the module that made them to all before it, so the last in their order is that one.
        kind = kind_in(list(model.get_submodule(damaged[-1]).parameters(recurse=False)))
        total = sum(1 for own in model.modules() if own._parameters)
        which = f"{len(damaged)} of {total} modules have such weights"
        return Located(plain_name(damaged[-1]) or type(model).__name__, "weights", kind, reason=which)
    trace = ReplayTrace(model)
    try:
        return _replay(model, batch, trace, bad_loss)
    except _NeedsOtherRanks as error:
        reason = f"{error} would wait for the other ranks"
    except Exception as error:  # too little memory, or a model that does not take the same batch twice
        log.debug("mpguard: the replay of a batch failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    return Located(None, reason=f"the batch cannot be replayed: {reason}", replayed=False)


class _NeedsOtherRanks(Exception):
    """A replay has come to a collective, which the other ranks would not take part in."""


def _without_collectives() -> contextlib.AbstractContextManager[Any]:
    """Return a context that raises `_NeedsOtherRanks` instead of a collective."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuse(TorchDispatchMode):  # type: ignore[no-untyped-call]  # so are torch's own classes of modes
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "c10d_functional", "_c10d_functional"):
                raise _NeedsOtherRanks(f"`{func._opname}`")
            return func(*args, **(kwargs or {}))

    mode: Any = Refuse
    return cast("contextlib.AbstractContextManager[Any]", mode())


def _replay(model: nn.Module, batch: CapturedCall, trace: ReplayTrace, bad_loss: bool) -> Located:
    import torch

    with _isolated(model, batch), trace, _without_collectives():
        args, kwargs = _copies((batch.args, batch.kwargs))
        if (kind := bad_kind(tensors_of((args, kwargs)))) != "":
            return Located("the batch", "input", kind, ranges_of(tensors_of((args, kwargs))))
        with contextlib.ExitStack() as stack:
            for device, dtype in batch.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            outputs = model(*args, **kwargs)
        if trace.forward is not None:
            return dataclasses.replace(trace.forward, computed=trace.computed())
        if bad_loss:
            return Located(LOSS, "forward", inputs=ranges_of(tensors_of(outputs)))
        return _backward(model, batch, trace, outputs)


def bad_weights(model: nn.Module) -> list[str]:
    """Return the modules whose own parameters are not finite, in their order."""
    return [name for name, module in model.named_modules() if kind_in(list(module.parameters(recurse=False)))]


def _backward(model: nn.Module, batch: CapturedCall, trace: ReplayTrace, outputs: Any) -> Located:
    import torch

    leaves = tensors_of(outputs)
    pairs = [
        (leaves[index], gradient)
        for index, gradient in batch.gradients.items()
        if index < len(leaves) and leaves[index].requires_grad and leaves[index].shape == gradient.shape
    ]
    if not pairs:
        reason = "the gradients of the model's outputs were not kept: they are larger than 64 MiB"
        return Located(None, "backward", reason=reason)
    gradients = [gradient for _, gradient in pairs]
    if (kind := kind_in(gradients)) != "":
        finite = not kind_in([leaf for leaf, _ in pairs])
        return Located(LOSS, "backward" if finite else "forward", kind, ranges_of([leaf for leaf, _ in pairs]))
    parameters = {name: own for name, own in model.named_parameters() if own.requires_grad}
    found = torch.autograd.grad([leaf for leaf, _ in pairs], list(parameters.values()), gradients, allow_unused=True)
    bad = [
        name for name, gradient in zip(parameters, found, strict=True) if gradient is not None and kind_in([gradient])
    ]
    own = ranges_of([leaf for leaf, _ in pairs])
    if (located := trace.backward(bad)) is not None:
        return located
    largest = max((float(each.abs().max()) for each in found if each is not None and each.numel()), default=0.0)
    reason = f"{EXPLODED}, up to {largest:.3g}" if largest > SQUARE_OVERFLOWS else FINITE
    return Located(None, "backward", inputs=own, reason=reason)


@contextlib.contextmanager
def _isolated(model: nn.Module, batch: CapturedCall) -> Iterator[None]:
    """Run the block without effect on the training: random numbers, buffers, modes and compiled code are as before."""
    import torch

    devices = [torch.cuda.current_device()] if batch.device_random is not None else []
    buffers = [(own, dict(own._buffers)) for own in model.modules() if own._buffers]
    training = [(own, own.training) for own in model.modules()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_eager())
        if devices:
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode(0)
            torch.cuda.set_rng_state(batch.device_random)
        torch.set_rng_state(batch.random)
        try:
            for own, kept in buffers:
                for name, buffer in kept.items():
                    own._buffers[name] = buffer.detach().clone() if buffer is not None else None
            yield
        finally:
            for own, kept in buffers:
                own._buffers.update(kept)
            for own, mode in training:
                own.training = mode


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Run compiled code eagerly, so that hooks inside of it run."""
    import torch

    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _copies(tree: Any) -> Any:
    """Return copies of inputs: a model may change them in place, and gradients stop at them."""
    import torch
    from torch.utils._pytree import tree_map

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        own = leaf.detach().clone()
        return own.requires_grad_(leaf.requires_grad) if own.is_floating_point() else own

    return tree_map(copy, tree)
