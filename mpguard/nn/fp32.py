"""Compute chosen modules in FP32, whatever their surroundings compute in: `fp32_modules` of a policy.

Each module gets a `forward` of its own that disables autocast and casts its inputs to FP32. Under autocast the output
stays in FP32, as that of autocast's own FP32 operators; elsewhere it is cast to the dtype of the input, because the
next matmul needs that. The logits of output heads and routers always stay in FP32. Where an engine holds the
parameters in BF16 or FP16 (DeepSpeed), they are cast for each call.

`forward` is set on the instance, so that classes, names, hooks and the `state_dict` do not change. It is a bound
method: a copy of the module has a bound method of its own, and an unpickled module has that of its class. This module
is not in `mpguard.runtime`, whose frames dynamo skips. Imports torch.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mpguard.nn.fp8.filters import Named, heads, in_router, is_wrapper, matches, pattern_around
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import DEFAULT_FP8_EXCLUDE, Policy

#: The attribute of a module that is computed in FP32.
MARK = "_mpguard_fp32"

_kept: weakref.WeakSet[nn.Module] = weakref.WeakSet()

#: Class and role of a module -> `Fp32State.kind`.
_kinds: dict[tuple[type[nn.Module], bool, torch.dtype | None], str] = {}


@dataclasses.dataclass
class Fp32State:
    """What is known about a module that is computed in FP32.

    name: its qualified name. pattern: the one that it matches. logits: True for an output head or a router, whose
    output stays in FP32. outside: the dtype that the engine computes in without autocast; None for FP32. former: the
    `forward` that the instance had. observing: True to record. calls: number of calls by the dtype of the output.
    weights: the dtypes of the parameters, as the engine holds them. compiled: the dtypes of the output in compiled
    code. kind: the same for all modules that one graph can serve, because they run the same code: a number of each
    module would be a constant of its graph, and each of a model's equal blocks would be compiled again. A text: dynamo
    makes an `int` that differs between modules a symbol, which is no constant.
    """

    name: str
    pattern: str
    logits: bool
    outside: torch.dtype | None
    former: Any = None
    observing: bool = True
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    weights: set[str] = dataclasses.field(default_factory=set)
    compiled: set[str] = dataclasses.field(default_factory=set)
    kind: str = ""


def matching(modules: Named, policy: Policy) -> dict[int, tuple[str, str]]:
    """Return the modules that a policy computes in FP32, with all modules in them: id -> its name and its pattern."""
    found: dict[int, tuple[str, str]] = {}
    for name, module in modules:
        pattern = pattern_around(name, policy.fp32_modules)
        if pattern is not None and not is_wrapper(module):
            found.setdefault(id(module), (name, pattern))
    return found


def keep(modules: Named, policy: Policy) -> list[str]:
    """Compute the modules that a policy names in FP32 from now on. Returns the buffers that were rounded before.

    modules: all named modules of a model. Parameters in BF16 or FP16 become FP32 in place, unless a module outside
    shares them. A second call adds modules that are new.
    """
    found = matching(modules, policy)
    if not found:
        return []
    by_name, output_heads = dict(modules), heads(modules)
    shared = _ids(module for _, module in modules if id(module) not in found)
    outside = policy.params_dtype.torch if policy.params_dtype in (Dtype.BF16, Dtype.FP16) else None
    rounded: list[str] = []
    for module in {id(module): module for _, module in modules if id(module) in found}.values():
        name, pattern = found[id(module)]
        if MARK not in vars(module):  # later, low parameters are those that an engine has cast
            rounded += [f"{name}.{buffer}" for buffer in _to_fp32(module, shared)]
            logits = id(module) in output_heads or matches(name, DEFAULT_FP8_EXCLUDE) or in_router(name, by_name)
            logits = logits and any(kind.__name__ == "Linear" for kind in type(module).__mro__)
            kind = _kinds.setdefault((type(module), logits, outside), str(len(_kinds)))
            vars(module)[MARK] = Fp32State(name, pattern, logits, outside, vars(module).get("forward"), kind=kind)
            vars(module)["forward"] = types.MethodType(forward, module)
            _kept.add(module)
    return rounded


def release(model: nn.Module) -> None:
    """Undo `keep`: the modules of a model compute as they would without mpguard. Their parameters stay in FP32."""
    for module in model.modules():
        state: Fp32State | None = vars(module).pop(MARK, None)
        if state is not None:
            _kept.discard(module)
            del vars(module)["forward"]
            if state.former is not None:
                vars(module)["forward"] = state.former


def kept() -> list[nn.Module]:
    """Return all modules of this process that are computed in FP32."""
    return list(_kept)


def observe(on: bool) -> None:
    """Start to record what these modules compute in, or stop."""
    for module in kept():
        state: Fp32State = vars(module)[MARK]
        state.observing = on
        if on:
            state.calls.clear()


def is_kept(module: nn.Module) -> bool:
    """True if a module is computed in FP32 by `keep`."""
    return MARK in vars(module)


def separable(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the outermost modules in a module that are computed in FP32 and can be sharded on their own.

    Each with its parent and its name in it. Modules without parameters, and those that share parameters with a module
    that is not in FP32, are left out.
    """
    shared = _ids(each for each in module.modules() if not is_kept(each))
    found: dict[int, tuple[nn.Module, str, nn.Module]] = {}

    def search(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            own = list(child.parameters())
            whole = all(is_kept(each) or is_wrapper(each) for each in child.modules())
            if own and whole and not any(id(each) in shared for each in own):
                found.setdefault(id(child), (parent, name, child))
            else:
                search(child)

    search(module)
    return list(found.values())


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters that the modules themselves hold."""
    return {id(each) for module in modules for each in module._parameters.values() if each is not None}


def _to_fp32(module: nn.Module, shared: set[int]) -> list[str]:
    """Make a module's own parameters and buffers FP32 in place. Returns the names of the buffers that were not."""
    for parameter in module._parameters.values():
        if type(parameter) is not torch.nn.Parameter or hasattr(parameter, "ds_id") or id(parameter) in shared:
            continue
        if _is_low(parameter.dtype) and parameter.grad is None:
            parameter.data = parameter.data.float()
    low = [name for name, buffer in module._buffers.items() if buffer is not None and _is_low(buffer.dtype)]
    for name in low:
        module._buffers[name] = module._buffers[name].float()  # type: ignore[union-attr]
    return low


def _is_low(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


# -- the forward pass ----------------------------------------------------------------------------


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's own forward in FP32. Dynamo traces this function."""
    state: Fp32State = getattr(self, MARK)
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    floating = [leaf.dtype for leaf in inputs if leaf.is_floating_point()]
    own = [each for each in (*self._parameters.values(), *self._buffers.values()) if each is not None]
    device = next((each.device.type for each in (*inputs, *own)), "cpu")
    outside = floating[0] if floating else state.outside
    if state.logits or torch.is_autocast_enabled(device):
        outside = None
    args, kwargs = tree_map_only(torch.Tensor, _raised, (args, kwargs))
    with torch.autocast(device, enabled=False):
        if any(_is_low(each.dtype) for each in own):
            output = _with_cast_weights(self, state, args, kwargs)
        else:
            output = _call(self, state, args, kwargs)
    if torch.compiler.is_compiling():
        _record_compiled(state.kind, _dtype_of(output))
    elif state.observing:
        _record(self, state, output)
    if outside is None or not _is_low(outside):
        return output
    return tree_map_only(torch.Tensor, lambda leaf: leaf.to(outside) if leaf.dtype == torch.float32 else leaf, output)


def _raised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if _is_low(tensor.dtype) else tensor


def _call(module: nn.Module, state: Fp32State, args: Any, kwargs: Any) -> Any:
    """Call the forward that the module would have without mpguard."""
    return type(module).forward(module, *args, **kwargs) if state.former is None else state.former(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_cast_weights(module: nn.Module, state: Fp32State, args: Any, kwargs: Any) -> Any:
    """Call the forward of a module with its parameters and buffers in FP32 copies, through which gradients flow.

    Attributes of the instance hide those of the same name that `nn.Module` looks up among the parameters.
    """
    own = {**module._parameters, **module._buffers}
    low = {name: each.float() for name, each in own.items() if each is not None and _is_low(each.dtype)}
    vars(module).update(low)
    try:
        return _call(module, state, args, kwargs)
    finally:
        for name in low:
            del vars(module)[name]


def _dtype_of(output: Any) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor of an output."""
    dtypes = [leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return dtypes[0] if dtypes else None


def _record(module: nn.Module, state: Fp32State, output: Any) -> None:
    """Record the dtype of the output, before it is cast for the surroundings, and those of the parameters."""
    dtype = _dtype_of(output)
    if dtype is not None:
        state.calls[_short(dtype)] += 1
    _record_weights(module, state)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _record_compiled(kind: str, dtype: torch.dtype | None) -> bool:
    """Record the dtypes of output and parameters in compiled code, for all modules that the graph can serve.

    Dynamo calls it once, while it traces a module; the graph is guarded by the dtypes of input and parameters.
    """
    for module in kept():
        state: Fp32State = vars(module)[MARK]
        if state.kind == kind and dtype is not None:
            state.compiled.add(_short(dtype))
            _record_weights(module, state)
    return True


def _record_weights(module: nn.Module, state: Fp32State) -> None:
    state.weights.update(_short(each.dtype) for each in module._parameters.values() if each is not None)


def _short(dtype: torch.dtype) -> str:
    known = Dtype.of(dtype)
    return known.short if known else str(dtype).removeprefix("torch.")
