"""The experts of a mixture in FP8, for transformers' modules with stacked weights of all experts.

Such a module computes two grouped matmuls: each row, a copy of a token, is multiplied by the matrix of its expert.
A converted module runs transformers' own function with FP8 matmuls in place of its own, so that gates, biases,
activations and routing weights are computed as they were, and parameters, names and checkpoints stay plain.

The matmul is torchao's: E4M3 with a scale per row, in both directions. It needs groups of multiples of 16 rows, so
the rows of each expert are padded with zeros, which add nothing, and an expert without rows gets a group of zeros. No
size is read from the GPU. In software it is the same matmul of the same rounded numbers.

This module is not in `mpguard.runtime`, whose frames dynamo skips. Imports torch.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpguard.core.errors import NotInForce
from mpguard.nn.fp8 import filters
from mpguard.nn.fp8.padding import PaddingState
from mpguard.policy import hardware
from mpguard.policy.dtype import Dtype
from mpguard.policy.fp8_modules import NONE, entry_for
from mpguard.policy.policy import Policy

#: The name of transformers' implementation with grouped matmuls.
GROUPED = "grouped_mm"

#: The module of torchao with the matmul, and its name there.
TORCHAO, PRODUCT = "torchao.prototype.moe_training.fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm"

#: The multiple that sizes and groups of rows must be of.
MULTIPLE = 16

#: The largest number in E4M3, and the least maximum that a scale is computed from, as in torchao.
LARGEST, LEAST = Dtype.FP8_E4M3.largest, 1e-12


# -- which modules -----------------------------------------------------------------------------------------------------


def reasons(modules: filters.Named, policy: Policy) -> dict[int, str]:
    """Return why experts cannot be FP8 under a policy, by the id of the module; "" for those that can."""
    names: dict[int, list[str]] = {}
    mixtures: dict[int, nn.Module] = {}
    for name, module in modules:
        if filters.is_experts(module):
            names.setdefault(id(module), []).append(name)
            mixtures[id(module)] = module
    if not mixtures:
        return {}  # without torchao's prototype, which takes seconds to import
    ends = filters.in_end_blocks(modules, policy)
    missing = _missing(policy)
    found: dict[int, str] = {}
    for module in mixtures.values():
        own_names = names[id(module)]
        if any(filters.pattern_around(name, policy.fp32_modules) for name in own_names):
            found[id(module)] = filters.FP32
        elif any(filters.matches(name, policy.kept_out_of_fp8) for name in own_names):
            found[id(module)] = filters.EXCLUDED
        elif id(module) in ends:
            found[id(module)] = filters.END
        elif (entry := entry_for(own_names, policy.fp8_modules)) is not None and entry.recipe == NONE:
            found[id(module)] = filters.NO_RECIPE
        else:
            found[id(module)] = _unfit(module) or missing
    return found


def hint(modules: filters.Named, policy: Policy) -> str:
    """Return a clause for the report on experts that could be FP8, and are not; an empty string without any."""
    if policy.fp8_experts or "torchao" not in policy.backends or "" not in reasons(modules, policy).values():
        return ""
    return " (fp8_experts: true computes experts in FP8)"


def _missing(policy: Policy) -> str:
    """Return what this machine lacks for the matmul; an empty string if nothing."""
    here = hardware.detect()
    if policy.compute_dtype is not Dtype.BF16:
        return f"grouped FP8 matmuls have results in BF16, the policy computes in {policy.compute_dtype}"
    if not policy.fp8_emulate and (lacking := here.lacks("grouped")):
        return lacking
    if not policy.fp8_emulate and _torchao() is None:
        return "needs torchao 0.18 and Triton, of which one is not installed here, or has another interface"
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no grouped matmuls"
    return ""


def _unfit(module: Any) -> str:
    """Return why experts cannot be FP8; an empty string if they can."""
    if "forward" in vars(module):
        return "have a forward of their own, set on the instance"
    implementation = getattr(module.config, "_experts_implementation", None)
    if implementation != GROUPED:
        return (
            f"are computed by the implementation {implementation}; call model.set_experts_implementation({GROUPED!r})"
        )
    weights = [each for each in module._parameters.values() if each is not None]
    shapes = [tuple(getattr(each, "ds_shape", each.shape)) for each in weights]
    if not any(len(shape) == 3 for shape in shapes):
        return "have no weights of their own (they are computed, or flattened by FSDP1)"
    for weight, shape in zip(weights, shapes, strict=True):
        if len(shape) != 3:
            continue
        if not weight.is_floating_point() or weight.dtype.itemsize < 2:
            return f"are quantized, their weights are {str(weight.dtype).removeprefix('torch.')}"
        if sizes := [size for size in shape[1:] if size % MULTIPLE]:
            return (
                f"{' and '.join(map(str, sizes))} {'is no multiple' if len(sizes) == 1 else 'are no multiples'} of 16"
            )
    return "" if _functions() is not None else f"{filters.EXPERTS} has another interface than expected"


# -- the module --------------------------------------------------------------------------------------------------------


class Fp8Experts(nn.Module):
    """Base class, placed before a class of experts. grouped: transformers' function with FP8 matmuls."""

    config: Any
    grouped: Any
    plain: type[nn.Module]
    emulated: bool
    _mpguard_fp8: PaddingState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config._experts_implementation != GROUPED:  # as in `generate`, which changes it for single tokens
            return super().forward(*args, **kwargs)
        return self.grouped(self, *args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Pickle the module by its plain class, because its own is made at run time."""
        return _restored, (self.plain, self.emulated), self.__dict__.copy()


def convert(module: nn.Module, state: PaddingState) -> None:
    """Give experts a class that multiplies in FP8; its parameters do not change."""
    module.__dict__["_mpguard_fp8"] = state
    kind: Any = kind_of(type(module), state.policy.fp8_emulate)  # type: ignore[arg-type]
    module.__class__ = kind


def _restored(plain: type[nn.Module], emulated: bool) -> nn.Module:
    """Return a converted module without attributes, for pickle and copy."""
    kind: Any = kind_of(plain, emulated)  # type: ignore[arg-type]
    made: nn.Module = kind.__new__(kind)
    return made


@functools.cache
def kind_of(plain: type[nn.Module], emulated: bool) -> type[Fp8Experts]:
    """Return the class of converted experts for a plain class."""
    functions = _functions()
    assert functions is not None  # else `reasons` leaves the experts out
    forward, helper = functions
    # Without the name of a module, by which dynamo would look the copied functions' globals up in transformers.
    own = {name: value for name, value in vars(sys.modules[filters.EXPERTS]).items() if name != "__name__"}
    own["_grouped_linear"] = _copy(helper, {**own, "_grouped_mm": _product(emulated)})
    attributes = {
        "__module__": __name__, "plain": plain, "emulated": emulated, "grouped": staticmethod(_copy(forward, own)),
    }  # fmt: skip
    return type(f"Fp8{plain.__name__}", (Fp8Experts, plain), attributes)


def _copy(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """Return a function of the same code with other globals."""
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)


@functools.cache
def _functions() -> tuple[types.FunctionType, types.FunctionType] | None:
    """Return transformers' function for grouped experts and the one by which it multiplies; None if that is unknown."""
    moe = sys.modules.get(filters.EXPERTS)
    forward, helper = (getattr(moe, name, None) for name in ("grouped_mm_experts_forward", "_grouped_linear"))
    if not (isinstance(forward, types.FunctionType) and isinstance(helper, types.FunctionType)):
        return None
    multiplies = "_grouped_linear" in forward.__code__.co_names and "_grouped_mm" in helper.__code__.co_names
    return (forward, helper) if multiplies and not (forward.__closure__ or helper.__closure__) else None


@functools.cache
def _torchao() -> Any:
    """Return torchao's matmul; None if it is not installed, or not there."""
    from torch.utils._triton import has_triton

    try:
        return getattr(importlib.import_module(TORCHAO), PRODUCT, None) if has_triton() else None
    except Exception:  # a prototype, whose modules compile kernels for several GPUs when they are imported
        return None


# -- the matmul -------------------------------------------------------------------------------------------------------


def _product(emulated: bool) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function for transformers' `_grouped_mm`, which dynamo can trace."""
    library = None if emulated else _torchao()

    def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """Return the matmul of each group of rows with its matrix, in the dtype that it would have under autocast.

        input: (rows, in). weight: (groups, in, out). offs: the end of each group; rows behind the last one have no
        group, and their results are not set.
        """
        device, rows = input.device.type, len(input)
        if device == "cpu" and not emulated:
            raise NotInForce(
                "experts in FP8: their input is on the CPU, which has no FP8 matmuls. Move the model and the batch "
                '(`model.to("cuda")`), or set fp8_emulate=True to compute FP8 in software'
            )
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        if not rows:
            return input.to(dtype) @ weight[0].to(dtype)
        reorder: Any = _Rows.apply
        emulate: Any = EmulatedGroupedMM.apply
        source, inside, target, ends = padded_layout(rows, offs)
        padded = reorder(_exact(input.to(dtype)), (source, inside), (target, None))
        if library is None:
            output = emulate(padded, _columns(weight), ends)
        else:
            output = library(padded, _columns(weight), ends, pad_token_groups_for_grouped_mm=False)
        result: torch.Tensor = reorder(output, (target, None), (source, inside))
        return result.to(dtype)

    return grouped_mm


def padded_layout(rows: int, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how groups of rows are padded to multiples of 16, at least one; sizes are not read from the GPU.

    source: for each padded row the one that it is a copy of. inside: True if it is one, and no padding. target: where
    each row is copied to. ends: of the padded groups. Rows without a group stay behind the last one.
    """
    former = offs.long()
    sizes = torch.diff(former, prepend=former.new_zeros(1))
    padded = ((sizes + MULTIPLE - 1) // MULTIPLE * MULTIPLE).clamp(min=MULTIPLE)
    ends = padded.cumsum(0)
    shift = torch.cat([ends - padded - (former - sizes), (ends - former)[-1:]])
    limit = nn.functional.pad(former, (0, 1), value=rows)
    target = torch.arange(rows, device=offs.device)
    target = target + shift[torch.bucketize(target, former, right=True)]
    most = (rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE + MULTIPLE * offs.numel()
    every = torch.arange(most, device=offs.device)
    group = torch.bucketize(every, ends, right=True)
    source = every - shift[group]
    return source.clamp(max=rows - 1), source < limit[group], target, ends.to(torch.int32)


class _Rows(torch.autograd.Function):
    """Rows in another order. Both directions only read: no two rows are added to the same place.

    to: for each row the one that it is a copy of, and False for a row of zeros, or None. back: the same for gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows: Any, to: Any, back: Any) -> torch.Tensor:
        ctx.save_for_backward(*back)
        return _taken(rows, *to)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _taken(gradient, *ctx.saved_tensors), None, None


def _taken(rows: torch.Tensor, index: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
    taken = rows.index_select(0, index)
    return taken if inside is None else torch.where(inside[:, None], taken, 0.0)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype that torchao rounds from: BF16 or FP32."""
    return tensor if tensor.dtype in (torch.bfloat16, torch.float32) else tensor.float()


def _columns(weight: torch.Tensor) -> torch.Tensor:
    """Return stacked matrices with columns in one piece each, as FP8 matmuls need them.

    FP32 weights are rounded to FP8 directly, without the copy in BF16 that autocast would keep for the backward pass.
    """
    if weight.stride(-2) == 1:
        return _exact(weight)
    return weight.to(torch.bfloat16).transpose(-2, -1).contiguous().transpose(-2, -1)


# -- in software -------------------------------------------------------------------------------------------------------


class EmulatedGroupedMM(torch.autograd.Function):
    """torchao's matmul in software: factors are rounded to FP8 as there, and multiplied in BF16, which holds them."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, ends: Any) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return torch._grouped_mm(_rounded(rows, -1), _rounded(weight, -2), ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weight, ends = ctx.saved_tensors
        for_rows = torch._grouped_mm(_rounded(gradient, -1), _rounded(weight, -1).transpose(-2, -1), ends)
        left, right = _rounded_by_group(gradient, ends), _rounded_by_group(rows, ends)
        for_weight = torch._grouped_mm(left.t(), right, ends)
        return for_rows, for_weight.transpose(-2, -1), None


def _rounded(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    """Round to FP8 with one scale for all elements along a dimension."""
    return _to_fp8(tensor, tensor.abs().amax(dimension, keepdim=True))


def _rounded_by_group(tensor: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Round to FP8 with a scale for each column of each group of rows."""
    group = torch.bucketize(torch.arange(len(tensor), device=tensor.device), ends.long(), right=True)[:, None]
    maxima = tensor.new_zeros(len(ends) + 1, tensor.shape[1])
    maxima = maxima.scatter_reduce(0, group.expand_as(tensor), tensor.abs(), "amax")
    return _to_fp8(tensor, maxima[group[:, 0]])


def _to_fp8(tensor: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 with scales that are powers of two, and back."""
    scale = torch.exp2(torch.floor(torch.log2((LARGEST / largest.double().clamp(min=LEAST)).float())))
    scaled = (tensor.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (scaled.float() / scale).to(torch.bfloat16)
