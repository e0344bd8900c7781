"""`ReplayTrace`: hooks on all modules of a replayed model, which find the first one that makes NaN or Inf."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpguard.nn.fp8.filters import plain_name
from mpguard.watching.containment import CONTAINMENT

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("mpguard")

#: What the code between modules is called: the loss, if it is computed outside of the model.
LOSS = "the loss function"


@dataclasses.dataclass(frozen=True)
class NarrowResult:
    """How a module computed results that are not finite.

    dtype: what it computed in: that of autocast, or of its results. weights: the dtype of its weights; empty without.
    largest: the largest magnitude of its results in FP32, from the same inputs; None if these are not finite either.
    tried: True if it was computed in FP32. largest_weight: the largest magnitude of its own parameters.
    """

    dtype: str
    weights: str = ""
    largest: float | None = None
    tried: bool = False
    largest_weight: float | None = None


@dataclasses.dataclass(frozen=True)
class Located:
    """The first module with NaN or Inf.

    module: its name; None if it was not found, then `reason` says why. phase: forward, backward, weights or input.
    kind: nan or inf. inputs: ranges of its inputs (backward: of the gradients that it got). replayed: False
    without a replay, at least of the forward pass. computed: how the module computed, where that is known. before: the
    module that it calls with NaN or Inf, which its own code made. buffers: of its buffers those that are not finite.
    """

    module: str | None
    phase: str = "forward"
    kind: str = "nan"
    inputs: tuple[dict[str, Any], ...] = ()
    reason: str = ""
    replayed: bool = True
    computed: NarrowResult | None = None
    before: str = ""
    buffers: tuple[str, ...] = ()

    def value(self) -> dict[str, Any]:
        """Return what the JSONL file has."""
        facts: dict[str, Any] = {"phase": self.phase, "kind": self.kind, "inputs": list(self.inputs)}
        if self.computed is not None:
            facts |= {"computed": dataclasses.asdict(self.computed)}
        facts |= {"before": self.before} if self.before else {}
        facts |= {"buffers": list(self.buffers)} if self.buffers else {}
        return {**facts, "reason": self.reason} if self.reason else facts


@dataclasses.dataclass
class _Call:
    """One call of a module in the replay. outputs: gradients of its outputs were finite, as far as they came."""

    name: str
    depth: int
    module: nn.Module
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    arguments: tuple[Any, Any] = ((), {})
    autocast: tuple[tuple[str, str], ...] = ()
    outputs_finite: bool = True
    got: tuple[dict[str, Any], ...] = ()


class ReplayTrace:
    """Hooks on all modules of a model, and what they saw."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._open: list[_Call] = []
        self.forward: Located | None = None
        self._maker: tuple[_Call, torch.Tensor] | None = None
        #: The first gradient that is not finite: the calls that it is an input, and an output, of.
        self._bad: int | None = None
        self._bad_kind = ""
        self._consumers: list[_Call] = []
        self._producers: list[_Call] = []
        self._calls: dict[str, _Call] = {}

    def __enter__(self) -> ReplayTrace:
        import torch

        for name, module in self._model.named_modules():
            own = plain_name(name)

            def before(module: Any, args: Any, kwargs: Any, own: str = own) -> None:
                autocast = tuple((kind, short(torch.get_autocast_dtype(kind))) for kind in autocast_kinds())
                depth = own.count(".") + bool(own)
                call = _Call(own, depth, module, tensors_of((args, kwargs)), (args, kwargs), autocast)
                self._open.append(call)
                for tensor in call.inputs:
                    if tensor.requires_grad:
                        on_gradient(tensor, self._listener(call, id(tensor), is_input=True))

            def after(_module: Any, _args: Any, outputs: Any) -> None:
                call = self._open.pop()
                if self.forward is not None:  # what follows has bad inputs
                    return
                self._calls[call.name] = call
                leaves = tensors_of(outputs)
                if kind := kind_in(leaves):
                    self._found(call, kind, next(each for each in leaves if kind_in([each])))
                for tensor in leaves:
                    if tensor.requires_grad:
                        on_gradient(tensor, self._listener(call, id(tensor), is_input=False))

            # First and last, so that the user's own hooks are seen as a part of the module.
            self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._hooks.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *_error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _found(self, call: _Call, kind: str, bad: torch.Tensor) -> None:
        """Note the module that made the first output that is not finite.

        If its inputs were bad already, no module made them: it was the code of a module around it, between calls.
        """
        before = ""
        if bad_kind(call.inputs):
            for around in reversed(self._open):
                before, bad = call.name, next(each for each in call.inputs if bad_kind([each]))
                kind, call = bad_kind([bad]), around
                if not bad_kind(call.inputs):
                    break
        inside = before.removeprefix(f"{call.name}.")
        buffers = [name for name, each in call.module.named_buffers(recurse=False) if bad_kind([each])]
        self.forward = Located(
            self._named(call.name), "forward", kind, ranges_of(call.inputs), before=inside, buffers=tuple(buffers)
        )
        self._maker = call, bad

    def _listener(self, call: _Call, key: int, *, is_input: bool) -> Callable[[torch.Tensor | None], None]:
        """Return a hook that records the gradient of an input or output of a call. key: the id of that tensor."""

        def seen(gradient: torch.Tensor | None) -> None:
            if gradient is None:
                return
            kind = kind_in([gradient])
            if not is_input:
                call.outputs_finite &= not kind
                call.got = call.got or ranges_of([gradient])
            if kind and self._bad in (None, key):
                self._bad, self._bad_kind = key, kind
                (self._consumers if is_input else self._producers).append(call)

        return seen

    def computed(self) -> NarrowResult | None:
        """Return how the module that made NaN or Inf forward computed, and what it gives in FP32."""
        if self._maker is None:
            return None
        call, bad = self._maker
        module = call.module
        own = next((each for each in module.parameters() if each.is_floating_point()), None)
        weights = short(own.dtype) if own is not None else ""
        dtype = dict(call.autocast).get(bad.device.type, "") if next(module.children(), None) is not None else ""
        dtype = dtype or short(bad.dtype)  # of a module that has others inside, the last one may have given FP32
        if dtype not in ("float16", "bfloat16"):
            return NarrowResult(dtype, weights, largest_weight=_largest_weight(module))
        try:
            largest = _largest_in_fp32(module, *call.arguments)
        except Exception as error:  # the module insists on its dtype
            log.debug("mpguard: a module cannot be computed in FP32", exc_info=error)
            return NarrowResult(dtype, weights)
        return NarrowResult(dtype, weights, largest, tried=True, largest_weight=_largest_weight(module))

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


def _largest_weight(module: nn.Module) -> float | None:
    """Return the largest magnitude among the module's own parameters; None if it has none."""
    own = [each.detach() for each in module.parameters(recurse=False) if each.is_floating_point() and each.numel()]
    return max((float(each.abs().max()) for each in own), default=None)


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
        leaves = tensors_of(torch.func.functional_call(module, own, args, kwargs))
    if not leaves or kind_in(leaves):
        return None
    return max(float(each.abs().max()) for each in leaves if each.numel())


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_in(tensors: Sequence[torch.Tensor]) -> str:
    """Return `nan` or `inf` if some elements are that; empty if all are finite."""
    import torch

    kind = ""
    for tensor in tensors:
        own = tensor.detach()
        own = own.float() if own.element_size() == 1 else own
        if not bool(torch.isfinite(own).all()):
            kind = "nan" if bool(torch.isnan(own).any()) else (kind or "inf")
    return kind


def bad_kind(tensors: Sequence[torch.Tensor]) -> str:
    """Return `nan` or `inf` if some elements are that; -Inf does not count, which additive masks are made of."""
    wide = [each.detach().float() if each.element_size() == 1 else each.detach() for each in tensors]
    return kind_in([each.clamp_min(0) for each in wide if each.is_floating_point()])


def ranges_of(tensors: Sequence[torch.Tensor]) -> tuple[dict[str, Any], ...]:
    """Return smallest and largest values of up to four tensors."""
    found = []
    for tensor in tensors[:4]:
        if tensor.numel():
            low, high = tensor.detach().float().aminmax()
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append({"min": float(low), "max": float(high), "dtype": dtype, "shape": list(tensor.shape)})
    return tuple(found)


# -- tensors -------------------------------------------------------------------------------------


def on_gradient(tensor: Any, hook: Callable[[torch.Tensor | None], None]) -> None:
    """Call a hook with the gradient of a tensor, None if there is none."""
    tensor.register_hook(CONTAINMENT.contained_hook(hook, "the watch of a model's gradients"))


def autocast_kinds() -> list[str]:
    import torch

    return [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]


def tensors_of(tree: Any) -> list[torch.Tensor]:
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
