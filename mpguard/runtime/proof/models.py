"""The models and optimizers of a process, found among all its objects, whatever framework has wrapped them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpguard.core.objects import objects_of
from mpguard.nn.fp8.filters import plain_name
from mpguard.runtime.proof import trees

if TYPE_CHECKING:
    import torch
    from torch import nn


def models_of(parameters: list[torch.Tensor]) -> list[nn.Module]:
    """Return the outermost modules that hold some of the parameters, whatever framework has wrapped them.

    They are searched among all objects of the garbage collector. A hook on module calls would be visible to dynamo,
    and would miss modules that are compiled, and modules of which other methods are called.
    """
    import torch

    modules = objects_of(torch.nn.Module)
    ids = {id(parameter) for parameter in parameters}
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            parents.setdefault(id(child), []).append(module)
    todo = [
        module for module in modules if any(id(own) in ids for own in module.__dict__.get("_parameters", {}).values())
    ]
    roots: dict[int, nn.Module] = {}
    known: set[int] = set()
    while todo:
        module = todo.pop()
        if id(module) in known:
            continue
        known.add(id(module))
        todo += parents.get(id(module), [])
        if id(module) not in parents:
            roots[id(module)] = module
    return list(roots.values())


def model_names(models: Sequence[Any]) -> list[str]:
    """Return the classes of models; of several of one class each with the variable of the script that has it."""
    kinds = [type(each).__name__ for each in models]
    script = vars(sys.modules["__main__"])
    variables = {id(value): name for name, value in list(script.items()) if not name.startswith("_")}
    names = []
    for number, (model, kind) in enumerate(zip(models, kinds, strict=True)):
        known = variables.get(id(model))
        label = f"`{known}`" if known else str(kinds[: number + 1].count(kind))
        names.append(kind if kinds.count(kind) == 1 else f"{kind} {label}")
    return names


def places_of(roots: list[nn.Module]) -> dict[int | None, tuple[str | None, str]]:
    """Return the names of the modules by id, and their names for messages: `layers.0.fc (Linear of Net)`."""
    places: dict[int | None, tuple[str | None, str]] = {}
    for root, model in zip(roots, model_names([innermost_module(root) for root in roots]), strict=True):
        for full, module in trees.named_modules(root):
            name, kind = plain_name(full), type(module).__name__
            own = f"{name} ({kind} of {model})" if name else f"{kind} itself"
            places.setdefault(id(module), (name, own))
    return places


def innermost_module(root: Any) -> Any:
    """Return the model inside the wrappers of DDP, FSDP1, DeepSpeed and torch.compile."""
    while type(root).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule") or (
        hasattr(root, "zero_optimization_stage")
    ):
        wrapped = getattr(root, "_orig_mod", None) or getattr(root, "module", None)
        if wrapped is None:
            break
        root = wrapped
    return root


def existing_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of torch that exist, without wrappers of other libraries."""
    import torch

    return [each for each in objects_of(torch.optim.Optimizer) if "param_groups" in vars(each)]
