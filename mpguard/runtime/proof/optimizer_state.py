"""The tensors that an optimizer keeps between steps, wherever it keeps them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from mpguard.runtime.proof.products import short

#: How many objects of an optimizer are searched for tensors.
OBJECT_LIMIT = 100_000


def state_dtypes(optimizer: Any, parameters: Sequence[Any], compute_copies: Iterable[Any] = ()) -> dict[str, int]:
    """Return the elements of an optimizer's states by dtype; quantized states by the name of their class.

    The states are in `optimizer.state`, in attributes, in dataclasses and other objects in them. Outside of
    `optimizer.state` a tensor in low precision counts only if it has the size of a parameter, or of all together:
    others are buffers for communication. parameters: those that the optimizer updates. compute_copies: tensors of
    the model, which an optimizer may also hold.
    """
    state = getattr(optimizer, "state", None)
    entries = dict(state) if isinstance(state, Mapping) else {}
    sizes = {_elements(each) for each in parameters}
    sizes.add(sum(_elements(each) for each in parameters))

    @functools.cache
    def known() -> set[int]:  # the memory of parameters and gradients; most optimizers have tensors in `state` only
        gradients = (own.grad for own in parameters if getattr(own, "grad", None) is not None)
        return {_storage(each) for each in (*parameters, *compute_copies, *gradients)}

    found: dict[str, int] = {}
    seen: set[int] = set()
    for root, in_state in ((list(entries.values()), True), (_attributes(optimizer), False)):
        for tensor in _tensors(root, seen):
            name = _state_dtype(tensor)
            if name is None or tensor.numel() <= 1 or (not in_state and _storage(tensor) in known()):
                continue
            if in_state or name not in ("bf16", "fp16") or _elements(tensor) in sizes:
                found[name] = found.get(name, 0) + tensor.numel()
    return found


def name_first(parameters: Sequence[Any], names: Mapping[int, str], models: Iterable[Any]) -> str:
    """Return which parameters an optimizer updates: `0.weight [32 x 16] and 5 more of Sequential`.

    names: of the parameters of the models, by id.
    """
    kinds = list(dict.fromkeys(type(each).__name__ for each in models))
    known = [each for each in parameters if id(each) in names]
    if not known:
        return ""
    more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
    return f"`{names[id(known[0])]}` [{' x '.join(map(str, known[0].shape))}]{more} of {', '.join(kinds)}"


def partition_names(optimizer: Any, names: Mapping[int, str]) -> dict[int, str]:
    """Return the names of the flat FP32 tensors of ZeRO-3, by id: its optimizer has them only while it steps.

    names: of the parameters of the model, by id.
    """
    flat = getattr(optimizer, "fp32_partitioned_groups_flat", None) or []
    groups = getattr(optimizer, "fp16_groups", None) or []
    found = {}
    for number, (tensor, group) in enumerate(zip(flat, groups, strict=False)):
        known = [names[id(own)] for own in group if id(own) in names]
        more = f" and {len(known) - 1} more" if len(known) > 1 else ""
        inside = f" of {known[0]}{more}" if known else ""
        found[id(tensor)] = f"FP32 partition {number}{inside}"
    return found


def _state_dtype(tensor: Any) -> str | None:
    """Return the dtype of a state; None for indices and flags.

    For a quantized tensor subclass it is the class name, because its `dtype` is that of the values it represents.
    """
    import torch

    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has one
    if type(local) not in (torch.Tensor, torch.nn.Parameter) and any(map(_is_quantized, _parts(local))):
        return type(local).__name__
    return short(local.dtype) if local.is_floating_point() or local.dtype in (torch.int8, torch.uint8) else None


def _parts(tensor: Any) -> list[Any]:
    """Return the tensors of which a tensor subclass is made."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return list(getattr(tensor, "__dict__", {}).values())


def _is_quantized(part: Any) -> bool:
    import torch

    if not isinstance(part, torch.Tensor):
        return False
    return part.dtype in (torch.int8, torch.uint8) or (part.is_floating_point() and part.dtype.itemsize == 1)


def _elements(tensor: Any) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).numel())


def _storage(tensor: Any) -> int:
    """Return the address of a tensor's memory; the identity of a tensor that has none."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage().data_ptr()) or id(local)
    except (NotImplementedError, RuntimeError, AttributeError):
        return id(local)


def _attributes(owner: Any) -> list[Any]:
    """Return the values of an object's own attributes, without the parameters of an optimizer."""
    names = [*getattr(owner, "__dict__", {})]
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    if dataclasses.is_dataclass(owner):
        names += [field.name for field in dataclasses.fields(owner)]
    values = {name: owner.__dict__[name] for name in names if name in getattr(owner, "__dict__", {})}
    for name in names:  # slots
        if name not in values and name not in ("__dict__", "__weakref__") and hasattr(owner, name):
            values[name] = getattr(owner, name)
    if hasattr(owner, "param_groups"):
        groups = values.pop("param_groups", None) or []
        values["param_groups"] = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return list(values.values())


def _tensors(root: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors in a tree of containers and objects. Models, functions, classes and modules are left out."""
    import types

    import torch

    left_out = (
        type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.nn.Module,
        torch.dtype, torch.device, torch.Generator, str, bytes, int, float, complex, bool, type(None),
    )  # fmt: skip
    todo, kept = [root], []
    while todo and len(seen) < OBJECT_LIMIT:
        value = todo.pop()
        kind = type(value)  # not `isinstance`: lazy proxies would load their objects
        is_tensor = issubclass(kind, torch.Tensor)
        if id(value) in seen or (not is_tensor and issubclass(kind, left_out)):
            continue
        seen.add(id(value))
        kept.append(value)  # or its id could be that of another object
        if is_tensor:
            yield value
        elif issubclass(kind, Mapping):
            todo += list(value.values())
        elif issubclass(kind, (Sequence, Set)) or kind.__name__ == "deque":
            todo += list(value)
        elif hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
            todo += _attributes(value)
