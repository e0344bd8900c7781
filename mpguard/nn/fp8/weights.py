"""Weights that are stored in FP8, and their exact values.

The matmuls read the FP8 weight; training needs the values from which it was rounded. Until the optimizer's first step
these are a copy in CPU memory, as Transformer Engine preserves it. At that step the optimizer's FP32 master weight is
set to the copy, bit for bit, and the copy is freed: masters that an optimizer creates itself from the FP8 values have
lost the rounding error. A `state_dict` and `revert` return the exact values; DDP broadcasts them.

This module depends on no library: an FP8 weight is any tensor with `quantize_`, an optimizer with master weights is
any with `set_scaled_state`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpguard.core.errors import MpguardWarning, NotInForce
from mpguard.core.patches import OWN, apply_own, patch
from mpguard.nn.compile import untraced
from mpguard.nn.fp8 import amax_history
from mpguard.nn.fp8.padding import PaddingState
from mpguard.targets.capabilities import FUSED_ADAM

#: The attribute of FP8 weights with their `MasterCopy`: it is preserved when they are tied, copied, or moved.
EXACT = "_mpguard_exact"

#: The key of the master weight in the state of an optimizer.
MASTER = "master_param"


@dataclasses.dataclass(eq=False)
class MasterCopy:
    """The exact values of an FP8 weight.

    value: a copy in CPU memory; from an optimizer's first step on, its master weight (`mastered`).
    stale: the optimizer updates the FP8 values and not their transposed copy, which backward passes read (S31).
    inner: the attributes of the FP8 weight itself, without those that the user has set on the parameter.
    """

    value: torch.Tensor
    stale: bool = False
    mastered: bool = False
    inner: frozenset[str] = frozenset()

    def put(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """Set values from outside (a checkpoint, another rank): exactly here, and rounded in the FP8 weight."""
        with torch.no_grad():
            if not torch.equal(self.value.to(value.device, value.dtype), value):
                # Otherwise `value` is the exact value, rounded: the one here has more digits.
                self.value.copy_(value)
            requantize(weight)


def exact_of(weight: Any) -> MasterCopy | None:
    """Return the exact values of a weight in FP8; None for other tensors."""
    return getattr(weight, "__dict__", {}).get(EXACT)


def is_kept_in_fp8(tensor: Any) -> bool:
    """True if a tensor is stored in FP8."""
    return hasattr(type(tensor), "quantize_")


def master_of(weight: Any) -> Any:
    """Return the tensor that an optimizer updates: the master of an FP8 weight, or any other parameter itself."""
    exact = exact_of(weight)
    return exact.value if exact is not None and exact.mastered else weight


def requantize(weight: Any) -> None:
    """Round the exact values into an FP8 weight, after they or its scale have changed."""
    exact = exact_of(weight)
    if exact is not None:
        weight.quantize_(exact.value.to(weight.device, torch.float32))


def check(name: str, layer: nn.Linear) -> None:
    """Raise `NotInForce` for a layer whose weight cannot be stored in FP8."""
    weight, where = layer.weight, f"convert: {name or 'the model'}: its weight "
    if type(weight).__name__ == "DTensor" or weight.numel() != layer.in_features * layer.out_features:
        raise NotInForce(f"{where}is sharded, by FSDP or DeepSpeed, which cannot keep it in FP8. Set fp8_param=False")
    if weight.is_meta:
        raise NotInForce(f"{where}is on the meta device, there is nothing to keep in FP8 yet. Load the model before")


def to_fp8_weights(layer: nn.Linear, fp8_weight: Any) -> None:
    """Convert the weight of a layer to FP8. Raises `RuntimeError` if autograd, or DDP, still references it.

    fp8_weight: the FP8 weight of the library's layer.
    """
    exact = exact_of(fp8_weight)
    if exact is None or exact_of(layer.weight) is not None:
        return  # `fp8_weight` is in high precision, or the weight is tied to one that has been converted
    exact.inner = frozenset(vars(fp8_weight))
    _swap(layer.weight, fp8_weight, frozenset())
    _register_step_hooks()
    apply_own(broadcast_masters)


def to_plain_weights(layer: nn.Linear) -> None:
    """Convert the weight of a layer back to a parameter with the exact values."""
    weight: Any = layer._parameters.get("weight")  # experts have none of that name
    exact = exact_of(weight)
    if exact is not None:
        _swap(weight, nn.Parameter(exact.value.to(weight.device, weight.dtype, copy=True)), exact.inner)


def _swap(weight: Any, other: Any, inner: frozenset[str]) -> None:
    """Exchange two tensors for all references; gradient, hooks and attributes, except `inner`, stay with `weight`."""
    own = {name: value for name, value in vars(weight).items() if name not in inner}
    hooks = {name: getattr(weight, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    gradient = weight.grad
    other.requires_grad_(weight.requires_grad)
    torch.utils.swap_tensors(weight, other)  # type: ignore[no-untyped-call]
    weight.grad = gradient
    for name, value in {**own, **{name: found for name, found in hooks.items() if found is not None}}.items():
        setattr(weight, name, value)


class Fp8WeightMixin(nn.Module):
    """Base class, placed before a library's FP8 layer whose weight may be in FP8: checkpoints have the exact values."""

    weight: torch.Tensor
    _mpguard_fp8: PaddingState

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars or not is_kept_in_fp8(self.weight):
            return
        exact = exact_of(self.weight)
        if exact is None:
            name = self._mpguard_fp8.name
            text = f"{name}: the saved weight is rounded to FP8; pickle loses the exact values. Save state_dicts"
            warnings.warn(MpguardWarning(text), stacklevel=2)
        value: Any = self.weight if exact is None else exact.value
        destination[f"{prefix}weight"] = (value.dequantize() if exact is None else value).detach().to(self.weight.dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        exact, value = exact_of(self.weight), state_dict.get(f"{prefix}weight")
        if exact is not None:  # a tensor that is assigned would replace the FP8 weight
            local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)
        if exact is not None and value is not None and value.shape == self.weight.shape:
            exact.put(self.weight, value)

    def check_kept(self) -> None:
        """Raise `NotInForce` if FSDP, DeepSpeed or pickle have replaced the weight since the conversion."""
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and self._mpguard_fp8.policy.fp8_param):
            return
        if exact_of(self.weight) is None:
            raise NotInForce(
                f"{self._mpguard_fp8.name or 'the model'}: its weight was kept in FP8 and has been replaced, by FSDP, "
                "DeepSpeed or pickle: its exact values are lost. Keep parameters in FP8 only in one process or under "
                "DDP, elsewhere set fp8_param=False; and save a state_dict, not the model"
            )


# -- optimizers --------------------------------------------------------------------------------------------------------


def without_masters(optimizer: Any) -> str | None:
    """Return why an optimizer cannot train FP8 weights; None if it can, or is still being constructed."""
    kind = type(optimizer)
    if not hasattr(kind, "set_scaled_state"):
        return f"{kind.__name__} has no FP32 master weights: updates too small for FP8 would be lost. Use {FUSED_ADAM}"
    if not hasattr(optimizer, "master_weights"):
        return None
    if not optimizer.master_weights or optimizer.master_weight_dtype is not torch.float32:
        return f"{kind.__name__} was created without FP32 master weights. Use {FUSED_ADAM}"
    if optimizer.store_param_remainders:
        return f"{kind.__name__} stores only the low bits of its masters. Set store_param_remainders=False"
    return None


@functools.cache
def _register_step_hooks() -> None:
    """Register two hooks permanently, after that of `amax_history`, which must find the optimizer's restored state."""
    amax_history.register_step_hook()
    register_optimizer_step_pre_hook(untraced(_stepping))
    register_optimizer_step_post_hook(untraced(_stepped))


def _weights(optimizer: Any) -> Iterator[tuple[Any, MasterCopy]]:
    """Yield the FP8 weights that an optimizer updates, with their exact values."""
    for weight in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        exact = exact_of(weight)
        if exact is not None:
            yield weight, exact


def _stepping(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Set the master weights to the model's exact values before each step, where they differ."""
    kept = list(_weights(optimizer))
    if kept and (reason := without_masters(optimizer)) is not None:
        raise NotInForce(f"fp8_param: {reason}")
    for weight, exact in kept:
        if optimizer.state[weight].get(MASTER) is not exact.value:
            _set_master(optimizer, weight, exact.value.to(weight.device))
            exact.value, exact.mastered = optimizer.state[weight][MASTER], True


def _set_master(optimizer: Any, weight: Any, value: torch.Tensor) -> None:
    """Set a weight's master in an optimizer. A master that is equal after rounding is kept: it has more digits."""
    state = optimizer.state[weight]
    if MASTER in state and torch.equal(state[MASTER].to(value.dtype), value):
        return
    if not state:
        optimizer.initialize_state(weight, False)
    optimizer.set_scaled_state(weight, MASTER, value.float())
    if not torch.equal(state[MASTER], value.float()):
        raise NotInForce(f"fp8_param: a master of {type(optimizer).__name__} differs from the value that was set")


def _stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Discard transposed copies that the step has made stale."""
    for weight, exact in _weights(optimizer):
        if exact.stale:
            weight._reset_caches()


# -- DDP ---------------------------------------------------------------------------------------------------------------


def _wrapped_in_ddp() -> None:
    """DDP gets a module, and does not broadcast its weights if it is told so."""
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2), init_sync=False)
    finally:
        dist.destroy_process_group()


@patch(
    "torch.nn.parallel.distributed:DistributedDataParallel.__init__",
    needs=("module", "init_sync"),
    reason="it broadcasts FP8 weights inexactly, and each rank would keep its own masters",
    lost="each rank keeps its own exact values of FP8 weights under DDP",
    check=_wrapped_in_ddp,
    part=OWN,
)
def broadcast_masters(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DistributedDataParallel.__init__` so that all ranks start with the exact values of the first rank.

    DDP itself copies only the FP8 weights, and block-wise ones not at all; each rank would keep its own masters.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        module = given.get("module")
        if isinstance(module, nn.Module) and given.get("init_sync", True) and any(map(exact_of, module.parameters())):
            mesh = given.get("device_mesh")
            share(module, mesh.get_group(mesh_dim=0) if mesh is not None else given.get("process_group"))
            given["init_sync"] = False
        original(*bound.args, **bound.kwargs)

    return __init__


def share(module: nn.Module, group: Any = None) -> None:
    """Broadcast the weights and buffers of the first rank of a group, FP8 weights with their exact values."""
    first = dist.get_global_rank(group, 0) if group is not None else 0
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    with torch.no_grad():
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if name in ignored:
                continue
            exact = exact_of(tensor)
            value = tensor.detach() if exact is None else exact.value.to(tensor.device, copy=True)
            dist.broadcast(value, first, group=group)
            if exact is not None:
                exact.put(tensor, value)
