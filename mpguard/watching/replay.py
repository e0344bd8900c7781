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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from mpguard.nn.fp8.filters import plain_name
from mpguard.watching.containment import CONTAINMENT

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

#: Why a model of TorchScript has no replay.
SCRIPTED = "it has a ScriptModule, which takes no hooks"

#: What the code between modules is called: the loss, if it is computed outside of the model.
LOSS = "the loss function"


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
        self.autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in _autocast_kinds()]
        self.training = module.training
        self.gradients: dict[int, torch.Tensor] = {}
        self.first = False  # it was kept before the models of the optimizers were known
        self.scalar = False  # one of the outputs is a scalar: the loss, from which all gradients come

    def follow(self, outputs: Any) -> None:
        """Keep the gradients of the outputs when they are computed."""
        leaves = _tensors(outputs)
        if len(leaves) == 1:  # nearly every model: nothing to choose from
            (leaf,) = leaves
            if leaf.requires_grad:
                self.scalar = leaf.numel() == 1
                if leaf.numel() * leaf.element_size() <= KEPT_BYTES:
                    _register(leaf, functools.partial(self._keep, 0))
            return
        with_graph = [(index, leaf) for index, leaf in enumerate(leaves) if leaf.requires_grad]
        self.scalar = any(leaf.numel() == 1 for _, leaf in with_graph)
        kept = 0
        for index, leaf in with_graph:
            if self.scalar and leaf.numel() > 1:
                continue
            kept += leaf.numel() * leaf.element_size()
            if kept <= KEPT_BYTES:
                _register(leaf, functools.partial(self._keep, index))

    def _keep(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # compiled code has outputs of which the loss uses only others
            self.gradients[index] = gradient.detach() if gradient.requires_grad else gradient


def _register(tensor: Any, hook: Callable[[torch.Tensor | None], None]) -> None:
    """Call a hook with the gradient of a tensor, None if there is none."""
    tensor.register_hook(CONTAINMENT.contained_hook(hook, "the watch of a model's gradients"))


def _device_random() -> Any:
    """Return the random state of the current GPU; it is kept on the host, so that reading it does not wait."""
    import torch

    cuda: Any = torch.cuda
    return cuda.get_rng_state() if cuda.is_initialized() and not cuda.is_current_stream_capturing() else None


def _autocast_kinds() -> list[str]:
    import torch

    return [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of a nested structure."""
    import torch

    plain: list[torch.Tensor] = []
    if _collect(tree, plain):
        return plain
    from torch.utils._pytree import tree_leaves

    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Mapping)):
        tree = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return [
        leaf
        for leaf in tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]


def _collect(tree: Any, found: list[torch.Tensor]) -> bool:
    """Add the floating-point tensors of plain tuples, lists and dicts; False if there is anything else in them.

    It is run at each step, and takes a fifth of what torch's own function does.
    """
    import torch

    kind = type(tree)
    if kind is tuple or kind is list:
        return all(_collect(each, found) for each in tree)
    if kind is dict:
        return all(_collect(each, found) for each in tree.values())
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            found.append(tree)
        return True
    return tree is None or kind in (bool, int, float, str)


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
        self.dtype = _short(batch.autocast[0][1]) if batch.autocast else ""
        if not self.batches:
            self.batches.append(batch)
            return
        size = sum(each.numel() * each.element_size() for each in _tensors((batch.args, batch.kwargs)))
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


@dataclasses.dataclass(frozen=True)
class NarrowResult:
    """How a module computed results that are not finite.

    dtype: what it computed in: that of autocast, or of its results. weights: the dtype of its weights; empty without.
    largest: the largest magnitude of its results in FP32, from the same inputs; None if these are not finite either.
    tried: True if it was computed in FP32.
    """

    dtype: str
    weights: str = ""
    largest: float | None = None
    tried: bool = False


@dataclasses.dataclass(frozen=True)
class Located:
    """The first module with NaN or Inf.

    module: its name; None if it was not found, then `reason` says why. phase: forward, backward, weights or input.
    kind: nan or inf. inputs: ranges of its inputs (backward: of the gradients that it got). replayed: False
    without a replay, at least of the forward pass. computed: how the module computed, where that is known.
    """

    module: str | None
    phase: str = "forward"
    kind: str = "nan"
    inputs: tuple[dict[str, Any], ...] = ()
    reason: str = ""
    replayed: bool = True
    computed: NarrowResult | None = None

    def value(self) -> dict[str, Any]:
        """Return what the JSONL file has."""
        facts: dict[str, Any] = {"phase": self.phase, "kind": self.kind, "inputs": list(self.inputs)}
        if self.computed is not None:
            facts |= {"computed": dataclasses.asdict(self.computed)}
        return {**facts, "reason": self.reason} if self.reason else facts


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


def replay(batch: CapturedCall) -> Located:
    """Run a batch again with hooks on all modules, and return the first that makes NaN or Inf from finite inputs."""
    model = plain_module(batch.module())
    if model is None:
        return Located(None, reason="the model no longer exists", replayed=False)
    reason = cannot_replay(model)
    if reason:
        return Located(None, reason=f"the batch cannot be replayed: {reason}", replayed=False)
    damaged = bad_weights(model)
    if damaged:
        # Bad gradients spread from the module that made them to all before it, so the last in their order is that one.
        kind = _kind_in(list(model.get_submodule(damaged[-1]).parameters(recurse=False)))
        total = sum(1 for own in model.modules() if own._parameters)
        which = f"{len(damaged)} of {total} modules have such weights"
        return Located(plain_name(damaged[-1]) or type(model).__name__, "weights", kind, reason=which)
    trace = _Trace(model)
    try:
        return _replay(model, batch, trace)
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


def _replay(model: nn.Module, batch: CapturedCall, trace: _Trace) -> Located:
    import torch

    with _isolated(model, batch), trace, _without_collectives():
        args, kwargs = _copies((batch.args, batch.kwargs))
        if (kind := _kind_in(_tensors((args, kwargs)))) != "":
            return Located("the batch", "input", kind, _ranges(_tensors((args, kwargs))))
        with contextlib.ExitStack() as stack:
            for device, dtype in batch.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            outputs = model(*args, **kwargs)
        if trace.forward is not None:
            return dataclasses.replace(trace.forward, computed=trace.computed())
        return _backward(model, batch, trace, outputs)


def bad_weights(model: nn.Module) -> list[str]:
    """Return the modules whose own parameters are not finite, in their order."""
    return [name for name, module in model.named_modules() if _kind_in(list(module.parameters(recurse=False)))]


def _backward(model: nn.Module, batch: CapturedCall, trace: _Trace, outputs: Any) -> Located:
    import torch

    leaves = _tensors(outputs)
    pairs = [
        (leaves[index], gradient)
        for index, gradient in batch.gradients.items()
        if index < len(leaves) and leaves[index].requires_grad and leaves[index].shape == gradient.shape
    ]
    if not pairs:
        reason = "the gradients of the model's outputs were not kept: they are larger than 64 MiB"
        return Located(None, "backward", reason=reason)
    gradients = [gradient for _, gradient in pairs]
    if (kind := _kind_in(gradients)) != "":
        finite = not _kind_in([leaf for leaf, _ in pairs])
        return Located(LOSS, "backward" if finite else "forward", kind, _ranges([leaf for leaf, _ in pairs]))
    parameters = {name: own for name, own in model.named_parameters() if own.requires_grad}
    found = torch.autograd.grad([leaf for leaf, _ in pairs], list(parameters.values()), gradients, allow_unused=True)
    bad = [
        name for name, gradient in zip(parameters, found, strict=True) if gradient is not None and _kind_in([gradient])
    ]
    own = _ranges([leaf for leaf, _ in pairs])
    return trace.backward(bad) or Located(None, "backward", inputs=own, reason=FINITE)


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


@dataclasses.dataclass
class _Call:
    """One call of a module in the replay. outputs: gradients of its outputs were finite, as far as they came."""

    name: str
    depth: int
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    arguments: tuple[Any, Any] = ((), {})
    autocast: tuple[tuple[str, str], ...] = ()
    outputs_finite: bool = True
    got: tuple[dict[str, Any], ...] = ()


class _Trace:
    """Hooks on all modules of a model, and what they saw."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._open: list[_Call] = []
        self.forward: Located | None = None
        self._maker: tuple[nn.Module, _Call, torch.Tensor] | None = None
        #: The first gradient that is not finite: the calls that it is an input, and an output, of.
        self._bad: int | None = None
        self._bad_kind = ""
        self._consumers: list[_Call] = []
        self._producers: list[_Call] = []
        self._calls: dict[str, _Call] = {}

    def __enter__(self) -> _Trace:
        import torch

        for name, module in self._model.named_modules():
            own = plain_name(name)

            def before(_module: Any, args: Any, kwargs: Any, own: str = own) -> None:
                autocast = tuple((kind, _short(torch.get_autocast_dtype(kind))) for kind in _autocast_kinds())
                depth = own.count(".") + bool(own)
                call = _Call(own, depth, _tensors((args, kwargs)), (args, kwargs), autocast)
                self._open.append(call)
                for tensor in call.inputs:
                    if tensor.requires_grad:
                        _register(tensor, self._listener(call, id(tensor), is_input=True))

            def after(module: Any, _args: Any, outputs: Any) -> None:
                call = self._open.pop()
                if self.forward is not None:  # what follows has bad inputs
                    return
                self._calls[call.name] = call
                leaves = _tensors(outputs)
                if kind := _kind_in(leaves):
                    self.forward = Located(self._named(call.name), "forward", kind, _ranges(call.inputs))
                    self._maker = (module, call, next(each for each in leaves if _kind_in([each])))
                for tensor in leaves:
                    if tensor.requires_grad:
                        _register(tensor, self._listener(call, id(tensor), is_input=False))

            # First and last, so that the user's own hooks are seen as a part of the module.
            self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._hooks.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *_error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _listener(self, call: _Call, key: int, *, is_input: bool) -> Callable[[torch.Tensor | None], None]:
        """Return a hook that records the gradient of an input or output of a call. key: the id of that tensor."""

        def seen(gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return
            kind = _kind_in([gradient])
            if not is_input:
                call.outputs_finite &= not kind
                call.got = call.got or _ranges([gradient])
            if kind and self._bad in (None, key):
                self._bad, self._bad_kind = key, kind
                (self._consumers if is_input else self._producers).append(call)

        return seen

    def computed(self) -> NarrowResult | None:
        """Return how the module that made NaN or Inf forward computed, and what it gives in FP32."""
        if self._maker is None:
            return None
        module, call, bad = self._maker
        own = next((each for each in module.parameters() if each.is_floating_point()), None)
        weights = _short(own.dtype) if own is not None else ""
        dtype = dict(call.autocast).get(bad.device.type, "") if next(module.children(), None) is not None else ""
        dtype = dtype or _short(bad.dtype)  # of a module that has others inside, the last one may have given FP32
        if dtype not in ("float16", "bfloat16"):
            return NarrowResult(dtype, weights)
        try:
            largest = _largest_in_fp32(module, *call.arguments)
        except Exception as error:  # the module insists on its dtype
            log.debug("mpguard: a module cannot be computed in FP32", exc_info=error)
            return NarrowResult(dtype, weights)
        return NarrowResult(dtype, weights, largest, tried=True)

    def backward(self, bad_parameters: Sequence[str]) -> Located | None:
        """Return the module whose backward pass made NaN or Inf. bad_parameters: whose gradients are not finite."""
        wrong = [call for call in self._consumers if call.outputs_finite]
        if wrong:
            call = max(wrong, key=lambda each: each.depth)
            return Located(self._named(call.name), "backward", self._bad_kind, call.got)
        for name in bad_parameters:
            call_of = self._calls.get(plain_name(name).rpartition(".")[0])
            if call_of is not None and call_of.outputs_finite:
                return Located(self._named(call_of.name), "backward", "inf", call_of.got)
        if self._producers:
            made = self._producers[0]
            outside = self._named(made.name.rpartition(".")[0]) if made.name else LOSS
            return Located(outside, "backward", self._bad_kind, made.got)
        return None

    def _named(self, name: str) -> str:
        """Return the name of a module; for the model itself, whose own code it is then, its class."""
        return name or type(self._model).__name__


def _largest_in_fp32(module: nn.Module, args: Any, kwargs: Any) -> float | None:
    """Return the largest magnitude that a module computes in FP32 from the same inputs; None if it is not finite."""
    import torch
    from torch.utils._pytree import tree_map

    def widened(leaf: Any) -> Any:
        narrow = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
        return leaf.detach().float() if narrow else leaf

    own = {name: widened(each) for name, each in (*module.named_parameters(), *module.named_buffers())}
    args, kwargs = tree_map(widened, (args, kwargs))
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for kind in ("cuda", "cpu"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        leaves = _tensors(torch.func.functional_call(module, own, args, kwargs))
    if not leaves or _kind_in(leaves):
        return None
    return max(float(each.abs().max()) for each in leaves if each.numel())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind_in(tensors: Sequence[torch.Tensor]) -> str:
    """Return `nan` or `inf` if some elements are that; empty if all are finite."""
    import torch

    kind = ""
    for tensor in tensors:
        own = tensor.detach()
        own = own.float() if own.element_size() == 1 else own
        if not bool(torch.isfinite(own).all()):
            kind = "nan" if bool(torch.isnan(own).any()) else (kind or "inf")
    return kind


def _ranges(tensors: Sequence[torch.Tensor]) -> tuple[dict[str, Any], ...]:
    """Return smallest and largest values of up to four tensors."""
    found = []
    for tensor in tensors[:4]:
        if tensor.numel():
            low, high = tensor.detach().float().aminmax()
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append({"min": float(low), "max": float(high), "dtype": dtype, "shape": list(tensor.shape)})
    return tuple(found)
