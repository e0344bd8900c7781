"""What a process really does, as plain data.

To what a `Recorder` has heard while it happened, `observe()` adds what can be read off the model and
the optimizer after a step. Nothing here judges; `proof` does.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpguard.nn.compile import is_compiled
from mpguard.nn.fp8.filters import plain_name
from mpguard.policy.policy import Policy
from mpguard.runtime.proof import fp8
from mpguard.runtime.proof.matmuls import ATTENTION, Pass, short
from mpguard.runtime.proof.recorder import Recorder

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass
class Observed:
    """One process after an applied optimizer step. Dtypes by short name, counted in elements.

    Of one optimizer and what it updates; a process with several has one for each.
    engine: `single`, `none` (several processes, no wrapper), `ddp`, `fsdp1`, `fsdp2`, `deepspeed-zeroN`.
    world_size: of the process group; 1 without one, whatever the launcher's variables say.
    compute: the matrix products with weights that are behind the gradients, in multiply-adds (all, where none
    has one); `computed_in` says whose weights.
    masters, gradients, states: of what the optimizer updates.
    reductions: of gradients across processes; `reduced_by` says how it was seen.
    replicated: norm and sum of gradients that must be the same on all ranks; None where they are sharded.
    unscaled: whether gradients came from a loss that no GradScaler had scaled.
    compiled: whether compiled code computed, not only whether something would be compiled when called.
    compiled_fp8: whether a module that is compiled has FP8 layers in it.
    """

    engine: str = "single"
    world_size: int = 1
    launched: int = 1
    device: str = "cpu"
    step: int = 0
    skipped: int = 0
    parameters: dict[str, int] = dataclasses.field(default_factory=dict)
    buffers: dict[str, int] = dataclasses.field(default_factory=dict)
    compute: dict[str, int] = dataclasses.field(default_factory=dict)
    computed_in: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    output: str | None = None
    optimizer: str = ""
    masters: dict[str, int] = dataclasses.field(default_factory=dict)
    gradients: dict[str, int] = dataclasses.field(default_factory=dict)
    states: dict[str, int] = dataclasses.field(default_factory=dict)
    reductions: dict[str, int] = dataclasses.field(default_factory=dict)
    reduced_by: str | None = None
    replicated: tuple[float, float] | None = None
    scaler: dict[str, Any] | None = None
    unscaled: bool = False
    fp8: fp8.Fp8Found | None = None
    tf32: bool | None = None
    compiled: bool = False
    compiled_fp8: bool = False


def device_of(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else str(parameter.device.type)


def observe(recorder: Recorder, model: nn.Module | None, optimizer: Any, *, policy: Policy, step: int = 1) -> Observed:
    """Everything about a process after a step, as plain data.

    model: None for those whose parameters the optimizer updates. policy: says why a layer is not FP8.
    """
    import torch

    optimizer = innermost(optimizer)
    updated = updated_by(optimizer)
    roots = [model] if model is not None else models_of(updated)
    world, launched = world_size()
    seen = Observed(step=step, world_size=world, launched=launched, skipped=recorder.skipped)
    seen.engine = engine_of(roots, recorder, world)
    modules = [pair for root in roots for pair in root.named_modules()]
    for root in roots:
        seen.device = device_of(root)
        _count_parameters(seen.parameters, (parameter for parameter in root.parameters() if parameter.requires_grad))
        _count(seen.buffers, root.buffers())
    if not roots:
        _count_parameters(seen.parameters, updated)
    compiled = [module for _, module in modules if is_compiled(module)]
    seen.compiled_fp8 = any(fp8.is_fp8(inner) for module in compiled for inner in module.modules())
    whole = _computed(seen, recorder, roots, updated)
    seen.output = recorder.output
    _optimized(seen, recorder, optimizer)
    _reduced(seen, recorder, roots, updated)
    seen.scaler = recorder.scalers.get(id(optimizer))
    seen.fp8 = fp8.find([(plain_name(name), module) for name, module in modules], policy, recorder.te_recipes)
    if seen.fp8 is not None:
        _multiplied(seen.fp8, modules, whole)
        fp8.look_at_weights(seen.fp8, modules, set(map(id, updated)))
    seen.tf32 = torch.backends.cuda.matmul.allow_tf32
    return seen


def innermost(optimizer: Any) -> Any:
    """The optimizer of torch in what accelerate and others have wrapped around it."""
    import torch

    while hasattr(optimizer, "optimizer") and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def updated_by(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in getattr(optimizer, "param_groups", None) or [] for parameter in group["params"]]


def models_of(parameters: list[torch.Tensor]) -> list[nn.Module]:
    """The outermost modules that hold some of the parameters, whatever framework has wrapped them.

    Found among all objects: a hook that sees models being called would be seen by dynamo, and would
    miss those that are compiled or whose methods are called.
    """
    import torch

    def all_modules() -> list[nn.Module]:
        # By type: `isinstance` would ask proxies of other libraries what they stand for, and wake them.
        return [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]

    modules = all_modules()
    if gc.get_freeze_count():  # `gc.freeze` hides them
        gc.unfreeze()
        modules = all_modules()
        gc.freeze()
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


def world_size() -> tuple[int, int]:
    """Processes in the process group (1 without one), and how many the launcher says it started."""
    import torch.distributed as dist

    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), launched
    return 1, launched


def engine_of(roots: list[nn.Module], recorder: Recorder, world: int) -> str:
    """What spreads the model over processes, by the objects that are there."""
    for candidate in (*recorder.engines, *roots):
        stage = getattr(candidate, "zero_optimization_stage", None)
        if callable(stage) and type(candidate).__module__.startswith("deepspeed"):
            return f"deepspeed-zero{stage()}"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = [module for root in roots for module in root.modules()]
    for name, engine in (("FullyShardedDataParallel", "fsdp1"), ("FSDPModule", "fsdp2")):
        kind = getattr(fsdp, name, None)
        if kind is not None and any(isinstance(module, kind) for module in modules):
            return engine
    if any(type(module).__name__ == "DistributedDataParallel" for module in modules):
        return "ddp"
    return "single" if world == 1 else "none"


def _computed(seen: Observed, recorder: Recorder, roots: list[nn.Module], updated: list[torch.Tensor]) -> Pass:
    """The products behind what the optimizer has updated, and the names of their weights."""
    whole = recorder.behind({id(parameter) for parameter in updated})
    names = {id(parameter): name for root in roots for name, parameter in root.named_parameters()}
    weighted = any(weight != ATTENTION for _, weight in whole.work)
    for (dtype, weight), work in whole.work.items():
        found = seen.computed_in.setdefault(dtype, [])
        if weight in names:
            found.append(plain_name(names[weight]).removesuffix(".weight"))
        if weight == ATTENTION and weighted:
            found.append("products of activations")
        else:
            seen.compute[dtype] = seen.compute.get(dtype, 0) + work
    seen.unscaled = whole.unscaled
    seen.compiled = whole.compiled or bool(recorder.compiled)
    return whole


def _multiplied(found: fp8.Fp8Found, modules: list[tuple[str, nn.Module]], whole: Pass) -> None:
    """Which FP8 layers had their weights multiplied by something else, and what share of the work is theirs."""
    layers = {id(module._parameters.get("weight")): name for name, module in modules if fp8.is_fp8(module)}
    work: Counter[int] = Counter()
    for (_, weight), size in whole.work.items():
        work[weight] += size if weight != ATTENTION else 0
    seen = [weight for weight in layers if work[weight]]  # not those that are sharded, frozen or in compiled code
    found.beside = [plain_name(layers[weight]) for weight in seen if not whole.kernels[weight]]
    if len(seen) == len(layers) and not whole.compiled:
        found.share = sum(whole.kernels[weight] for weight in layers) / work.total()


def _optimized(seen: Observed, recorder: Recorder, optimizer: Any) -> None:
    import torch
    from torch.utils._pytree import tree_leaves

    if optimizer is None:
        return
    seen.optimizer = type(optimizer).__name__
    if id(optimizer) not in recorder.updated and isinstance(optimizer, torch.optim.Optimizer):
        recorder.optimizer_stepped(optimizer)
    seen.masters, seen.gradients = map(dict, recorder.updated.get(id(optimizer), ({}, {})))
    state = getattr(optimizer, "state", None) or {}
    tensors = [t for t in tree_leaves([dict(entry) for entry in state.values()]) if isinstance(t, torch.Tensor)]
    for tensor in tensors:
        if tensor.numel() > 1 and (name := _state_dtype(tensor)):
            seen.states[name] = seen.states.get(name, 0) + tensor.numel()


def _state_dtype(tensor: torch.Tensor) -> str | None:
    """As what a state is held; None for indices and flags. Quantized ones say another dtype, or are bytes."""
    import torch

    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        return type(local).__name__
    return short(local.dtype) if local.is_floating_point() or local.dtype in (torch.int8, torch.uint8) else None


def _reduced(seen: Observed, recorder: Recorder, roots: list[nn.Module], updated: list[torch.Tensor]) -> None:
    """The dtypes in which gradients crossed processes: at the collective, or as DDP's reducer says."""
    if seen.world_size == 1:
        return
    ids = {id(parameter) for parameter in updated}
    spread = [module for root in roots for module in root.modules() if _is_ddp(module)]
    spread = [each for each in spread if any(id(own) in ids for own in each.parameters())] or spread
    if seen.engine == "ddp":
        seen.replicated = fingerprint([own for each in spread for own in _replicated(each, seen.world_size)])
    elif seen.engine == "none":
        seen.replicated = fingerprint(updated)
    if spread and not any(getattr(module, "_comm_hooks", None) for module in spread):
        # A bucket has the dtype of its parameters; a communication hook reduces in Python instead.
        for module in spread:
            _count(seen.reductions, (own for own in module.parameters() if own.requires_grad))
        seen.reduced_by = "the buckets of DDP's reducer"
    elif recorder.reductions:
        seen.reductions, seen.reduced_by = dict(recorder.reductions), "the collective"


def _is_ddp(module: nn.Module) -> bool:
    return type(module).__name__ == "DistributedDataParallel" and hasattr(module, "reducer")


def _replicated(module: Any, world: int) -> list[torch.Tensor]:
    """The parameters that DDP holds in step on all ranks; none where its group is a part of them."""
    import torch.distributed as dist

    if dist.get_world_size(module.process_group) != world:
        return []
    ignored = getattr(module, "parameters_to_ignore", ())
    return [own for name, own in module.module.named_parameters() if name not in ignored]


def fingerprint(parameters: list[torch.Tensor]) -> tuple[float, float] | None:
    """Norm and sum of all gradients, in FP64; None where there are none."""
    found = [own.grad.detach().double() for own in parameters if own.grad is not None and not own.grad.is_sparse]
    if not found:
        return None
    return sum(float(each.square().sum()) for each in found) ** 0.5, sum(float(each.sum()) for each in found)


def _count_parameters(counter: dict[str, int], parameters: Iterable[torch.Tensor]) -> None:
    """As what they are held: those that are kept in FP8 say the dtype of their exact values."""
    from mpguard.nn.fp8.weights import is_kept_in_fp8

    own = list(parameters)
    _count(counter, (each for each in own if not is_kept_in_fp8(each)))
    if kept := sum(each.numel() for each in own if is_kept_in_fp8(each)):
        counter["fp8"] = counter.get("fp8", 0) + kept


def _count(counter: dict[str, int], tensors: Any) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            # Partitioned parameters of ZeRO-3 are empty between uses and know their real size.
            dtype = short(tensor.dtype)
            counter[dtype] = counter.get(dtype, 0) + int(getattr(tensor, "ds_numel", tensor.numel()))
