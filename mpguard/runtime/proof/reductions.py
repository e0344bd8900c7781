"""Which gradients are reduced across processes, in which dtype and over which dimension; and which are not.

A parameter of the optimizer belongs to an engine that reduces its gradient (DDP, FSDP, DeepSpeed), or the script has
sent its gradient to the other ranks, or each rank trains it alone. What only shows between ranks is in a `Fingerprint`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpguard.nn.fp8.filters import plain_name
from mpguard.policy.allow import LOCAL_SGD
from mpguard.runtime.proof import trees
from mpguard.runtime.proof.gradients import Gradients
from mpguard.runtime.proof.products import short
from mpguard.runtime.proof.samples import local
from mpguard.runtime.proof.verdict import Failure, FailureKind
from mpguard.runtime.ranks import world_size

if TYPE_CHECKING:
    import torch
    from torch import nn

#: `row` of the failure of ranks whose gradients differ: it shows between ranks only.
BETWEEN_RANKS = "reduction between ranks"

#: Relative difference between gradients that differ in the order of summation only.
TOLERANCE = 1e-3

#: Into how many parts the parameters are divided for a fingerprint; with fewer parameters each has its own. Rank 0
#: reads the parts of all ranks: they are fewer if there are many ranks.
PARTS, FEWEST_PARTS, PARTS_OF_ALL = 512, 16, 65_536

#: Elements of a gradient that are converted to FP64 at once; on a GPU, where each part is a kernel more, others.
CHUNK, CHUNK_ON_GPU = 1 << 20, 1 << 24


@dataclasses.dataclass
class Fingerprint:
    """What must be the same on all ranks after a step. Plain data, of bounded size.

    gradients: norm and sum of the gradients that every rank should have, by the name of the first parameter of a part.
    alone: the same for parameters that belong to no engine and were not sent, with a sum of some of their values before
    the first step; outside: the names of those in no module of an engine, which may leave out some of its own.
    engine: True if an engine, or a reduce-scatter of the script, reduces some of the others. partly: as `alone`, for
    parameters of an engine over a group of `ranks` ranks, which are not all. loss: of the last backward pass of this
    rank; it may differ.
    passes_on: True if this rank has sent activations to another one; exchanges: to all, to each its own, or its part of
    a sum.
    """

    gradients: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    alone: dict[str, tuple[float, float, float]] = dataclasses.field(default_factory=dict)
    outside: list[str] = dataclasses.field(default_factory=list)
    engine: bool = False
    partly: dict[str, tuple[float, float, float]] = dataclasses.field(default_factory=dict)
    ranks: int = 0
    loss: float | None = None
    passes_on: bool = False
    exchanges: bool = False
    parts: bool = False
    within: dict[str, dict[str, tuple[float, float]]] = dataclasses.field(default_factory=dict)


def is_ddp(module: nn.Module) -> bool:
    """True for an initialized `DistributedDataParallel`."""
    return type(module).__name__ == "DistributedDataParallel" and hasattr(module, "reducer")


def has_hook(module: Any) -> bool:
    """True if a communication hook of a DDP reduces its gradients, a built-in one in C++ too."""
    return bool(getattr(module, "_comm_hooks", None) or module._get_ddp_logging_data().get("comm_hook"))


def configured(roots: Sequence[nn.Module]) -> tuple[dict[str, int], str | None]:
    """Return in which dtype the engines of models reduce, by their settings, and what that was read from.

    It is what they do where their collectives were not recorded. Empty if the hook of a DDP reduces.
    """
    found: Counter[str] = Counter()
    modules = [module for root in roots for module in trees.modules(root)]
    ddp = [module for module in modules if is_ddp(module)]
    if any(map(has_hook, ddp)):
        return {}, None
    for module in ddp:  # a bucket has the dtype of its parameters
        for own in module.parameters():
            found[short(own.dtype)] += own.numel() if own.requires_grad and own.is_floating_point() else 0
    for dtype, elements in itertools.chain.from_iterable(map(_reduced_by_fsdp, modules)):
        found[short(dtype)] += elements
    return dict(+found), "the buckets of DDP's reducer" if ddp else "the settings of FSDP" if found else None


def _reduced_by_fsdp(module: Any) -> Iterator[tuple[torch.dtype, int]]:
    """Yield the dtypes in which the own groups of parameters of an FSDP module are reduced, and their elements."""
    handle: Any = getattr(module, "_handle", None) if hasattr(module, "_fsdp_wrapped_module") else None
    if getattr(handle, "_reduce_dtype", None) is not None:
        yield handle._reduce_dtype, handle.flat_param.numel()
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
        for own in group.fsdp_params if group is not None else ():
            if own.sharded_param.requires_grad:
                yield own.reduce_dtype or own.param_dtype or own.orig_dtype, own.sharded_param.numel()


@dataclasses.dataclass
class Coverage:
    """The trained parameters of an optimizer by what reduces their gradients. Named, without duplicates.

    replicated: of DDP over all ranks. engine: other parameters of engines. sent: those whose gradients the script has
    sent. sharded: those whose gradients are this rank's part of a reduce-scatter of the script. alone: the rest;
    outside: the names of those that are in no module of an engine. partly: those among `engine` and `sent` whose
    gradients are reduced over a group of `ranks` ranks, which are not all, and which each rank of the group has as a
    whole. within: those among `sent`, by the ranks of the group.
    """

    replicated: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    engine: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    sent: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    sharded: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    alone: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    outside: set[str] = dataclasses.field(default_factory=set)
    partly: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    ranks: int = 0
    within: dict[tuple[int, ...], dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)


def coverage(
    optimizer: Any,
    roots: Sequence[nn.Module],
    engines: Iterable[Any],
    gradients: Gradients,
    sharded: Collection[int] = (),
) -> Coverage:
    """Return what reduces the gradient of each parameter that has one.

    engines: DeepSpeed engines may be among them. sharded: see `Shards.found`.
    """
    world = world_size()[0]
    parameters = [own for group in getattr(optimizer, "param_groups", None) or [] for own in group["params"]]
    found = Coverage()
    names = dict(_parameter_names(roots))
    replicated, managed = _managed_by_ddp(roots, world)
    groups = dict(_groups(roots))
    managed |= _managed_by_fsdp1(roots)
    whole = any(_is_optimizer_of(engine, optimizer) for engine in engines)
    sharded_modules = _has_fsdp2(roots)
    inside = {id(own) for module in _engine_modules(roots) for own in module.parameters()}
    for number, own in enumerate(parameters):
        if own.grad is None and id(own) not in gradients.made:
            continue
        name = names.get(id(own), f"parameter {number}")
        if id(own) in replicated:
            found.replicated[name] = own
        elif whole or id(own) in managed or _is_sharded(own, world, sharded_modules):
            found.engine[name] = own
            if groups.get(id(own), world) < world:
                found.partly[name], found.ranks = own, groups[id(own)]
        elif id(own) in sharded:
            found.sharded[name] = own
        elif id(own) in gradients.reduced:
            found.sent[name] = own
            members = _members(gradients.groups.get(id(own), ()))
            if 0 < len(members) < world:
                found.partly[name], found.ranks = own, len(members)
                found.within.setdefault(members, {})[name] = own
        else:
            found.alone[name] = own
            found.outside |= set() if id(own) in inside else {name}
    return found


def _members(groups: Collection[str]) -> tuple[int, ...]:
    """Return the ranks of the process group over which the script has reduced; none if there are several groups."""
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    if len(groups) == 1:
        with contextlib.suppress(Exception):  # the script has destroyed the group
            return tuple(dist.get_process_group_ranks(c10d._resolve_process_group(next(iter(groups)))))
    return ()


def _parameter_names(roots: Sequence[nn.Module]) -> Iterator[tuple[int, str]]:
    """Yield the ids of all parameters with their names; with the class of their model if there are several models."""
    for root in roots:
        model = f"{type(getattr(root, 'module', root)).__name__}." if len(roots) > 1 else ""
        for name, own in trees.named_parameters(root):
            yield id(own), model + plain_name(name)


def _managed_by_ddp(roots: Sequence[nn.Module], world: int) -> tuple[set[int], set[int]]:
    """Return the ids of the parameters that DDP reduces over all ranks, and over some of them."""
    import torch.distributed as dist

    everywhere: set[int] = set()
    somewhere: set[int] = set()
    for root in roots:
        for module in trees.modules(root):
            if is_ddp(module):
                wrapper: Any = module
                ignored = getattr(module, "parameters_to_ignore", ())
                delayed = {id(own) for own in getattr(module, "_delay_all_reduce_params", ())}
                own = {id(p) for name, p in wrapper.module.named_parameters() if name not in ignored} | delayed
                whole = dist.get_world_size(wrapper.process_group) == world
                (everywhere if whole else somewhere).update(own)
    return everywhere, somewhere - everywhere


def _groups(roots: Sequence[nn.Module]) -> Iterator[tuple[int, int]]:
    """Yield the ids of parameters that each rank of a group has as a whole, and the size of the group.

    They are those of DDP. FSDP2 over one rank calls no collective: its reduction is not observed.
    """
    for root in roots:
        for module in trees.modules(root):
            group: Any = getattr(module, "process_group", None)
            if is_ddp(module):
                yield from ((id(own), group.size()) for own in module.parameters())


def _managed_by_fsdp1(roots: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the flat parameters of FSDP1, and of the model's parameters that are in them."""
    managed: set[int] = set()
    for root in roots:
        for module in trees.modules(root):
            handle = getattr(module, "_handle", None) if hasattr(module, "_fsdp_wrapped_module") else None
            if handle is not None:
                managed.add(id(handle.flat_param))
                managed.update(map(id, getattr(handle.flat_param, "_params", None) or ()))
    return managed


def _engine_modules(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that DDP, FSDP1 or FSDP2 manages as a whole, but for what they are told to leave out."""
    for root in roots:
        for module in trees.modules(root):
            if is_ddp(module) or hasattr(module, "_fsdp_wrapped_module") or hasattr(module, "_get_fsdp_state"):
                yield module


def _has_fsdp2(roots: Sequence[nn.Module]) -> bool:
    import sys

    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and any(isinstance(module, kind) for root in roots for module in trees.modules(root))


def _is_sharded(parameter: Any, world: int, fsdp2: bool) -> bool:
    """True if FSDP2 or tensor parallelism manages a parameter on all ranks."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and (fsdp2 or int(mesh.size()) == world)


def _is_optimizer_of(engine: Any, optimizer: Any) -> bool:
    """True if a DeepSpeed engine steps an optimizer, and so reduces all of its gradients."""
    inner = getattr(engine, "basic_optimizer", None)
    while inner is not None and inner is not optimizer:
        inner = getattr(inner, "optimizer", None)
    return inner is not None


# -- the collectives -----------------------------------------------------------------------------


def reduced(
    gradients: Gradients, parameters: Iterable[Any], roots: Sequence[nn.Module]
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Return the elements that were reduced by dtype, and the same for each dimension of the mesh, or process group.

    Below a DDP, a hook's collectives over another group are not of gradients. What neither the script nor hooks have
    reduced of these parameters belongs to other optimizers.
    """
    parameters = list(parameters)
    ddp = [module for root in roots for module in trees.modules(root) if is_ddp(module)]
    wrappers: list[Any] = list(ddp)
    world = world_size()[0]
    groups = {str(module.process_group.group_name) for module in ddp if hasattr(module.process_group, "group_name")}
    labels = dict(_labels(parameters))
    for group in (module.process_group for module in wrappers):
        if (size := group.size()) < world:
            labels.setdefault(str(group.group_name), f"{size} of {world} ranks")
    total: dict[str, int] = {}
    over: dict[str, dict[str, int]] = {}
    others = () if ddp else _of_others(gradients, parameters)
    for (origin, dtype, group), elements in gradients.sent.items():
        if origin in others or (origin == "hook" and groups and group not in groups):
            continue
        total[dtype] = total.get(dtype, 0) + elements
        label = labels.get(group, "") or ("by the script" if origin == "script" and ddp else "")
        part = over.setdefault(label, {})
        part[dtype] = part.get(dtype, 0) + elements
    return total, over


def _of_others(gradients: Gradients, parameters: Iterable[Any]) -> list[str]:
    """Return the origins of reductions that have none of the parameters. Copies of them are not known: none then."""
    own = {id(each) for each in parameters}
    if not own & gradients.leaves:
        return []
    return [
        origin for origin, known in (("script", gradients.reduced), ("hook", gradients.in_hooks)) if not own & known
    ]


def _labels(parameters: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield process groups with the dimension of the mesh that they are of; only meshes of several dimensions."""
    seen = set()
    for own in parameters:
        mesh = getattr(own, "device_mesh", None)
        names = getattr(mesh, "mesh_dim_names", None) or ()
        if mesh is None or id(mesh) in seen or len(names) < 2:
            continue
        seen.add(id(mesh))
        for name in names:
            yield str(mesh.get_group(name).group_name), str(name)


# -- between ranks -------------------------------------------------------------------------------


def fingerprint(found: Coverage, gradients: Gradients) -> Fingerprint:
    """Return what must be the same on all ranks."""
    sent = {name: own for name, own in found.sent.items() if name not in found.partly}
    outside = {name: own for name, own in found.alone.items() if name in found.outside}
    inside = {name: own for name, own in found.alone.items() if name not in found.outside}
    known = {name: own for name, own in found.partly.items() if id(own) in gradients.starts}
    everywhere, partly = _parts({**found.replicated, **sent}), _parts(known)
    within = {ranks: _parts(parameters) for ranks, parameters in found.within.items()}
    alone = [*_parts(outside), *_parts(inside)]
    groups = [*everywhere, *alone, *partly, *itertools.chain.from_iterable(within.values())]
    sums = _sums([own for part in groups for _, own in part])
    result = Fingerprint({_name(part): _checksum(part, sums) for part in everywhere})
    for ranks, group in within.items():
        result.within[", ".join(map(str, ranks))] = {_name(part): _checksum(part, sums) for part in group}
    for part in alone:
        result.alone[_name(part)] = (*_checksum(part, sums), _start(part, gradients))
    result.outside = [_name(part) for part in _parts(outside)]
    result.engine = bool(found.engine or found.sharded or found.within)
    result.loss = float(gradients.loss) if gradients.loss is not None else None
    for part in partly:
        result.partly[_name(part)] = (*_checksum(part, sums), _start(part, gradients))
    result.ranks = found.ranks
    result.passes_on, result.exchanges = bool(gradients.passed_on), bool(gradients.exchanged)
    return result


def _parts(parameters: dict[str, torch.Tensor]) -> list[list[tuple[str, torch.Tensor]]]:
    """Divide parameters with dense gradients, in their order, into as many parts as a fingerprint may have."""
    import torch.distributed as dist

    dense = [(name, own) for name, own in parameters.items() if own.grad is not None and not own.grad.is_sparse]
    most = max(FEWEST_PARTS, min(PARTS, PARTS_OF_ALL // dist.get_world_size()))
    size = max(1, -(-len(dense) // most))
    return [dense[first : first + size] for first in range(0, len(dense), size)]


def _name(part: list[tuple[str, torch.Tensor]]) -> str:
    return part[0][0] + (f" (or one of the next {len(part) - 1})" if len(part) > 1 else "")


def _checksum(part: list[tuple[str, torch.Tensor]], sums: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    """Return norm and sum of the gradients of a part. sums: see `_sums`."""
    squares, added = zip(*(sums[id(own)] for _, own in part), strict=True)
    return sum(squares) ** 0.5, sum(added)


def _start(part: list[tuple[str, torch.Tensor]], gradients: Gradients) -> float:
    """Return a sum of some values of the parameters of a part before the first step; of those that are known."""
    values = [gradients.starts[id(own)] for _, own in part if id(own) in gradients.starts]
    return sum(float(each.double().sum()) for each in values)


def _sums(parameters: Iterable[torch.Tensor]) -> dict[int, tuple[float, float]]:
    """Return the sums of squares and of values of each parameter's gradient, in FP64, by the id of the parameter.

    Each device is read once: a GPU would be waited for at each reading, which cost half of a check.
    """
    import torch

    gradients = {id(own): local(own.grad).detach() for own in parameters}
    found: dict[int, tuple[float, float]] = {}
    with torch.no_grad():
        for device in {each.device for each in gradients.values()}:
            numbers = [number for number, each in gradients.items() if each.device == device]
            sums = (_sums_on_cpu if device.type == "cpu" else _sums_on_gpu)([gradients[number] for number in numbers])
            found |= {number: (square, added) for number, (square, added) in zip(numbers, sums.tolist(), strict=True)}
    return found


def _sums_on_gpu(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares and the sum of each gradient, in FP64, with few kernels and no copy of a gradient.

    torch's own sums and norms in FP64 copy what they read to FP64 (`make_reduction`): they get a part at a time.
    """
    import torch

    norms = _norms_at_once(gradients)
    for number, gradient in enumerate(gradients):
        if number not in norms:
            parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in _rows(gradient)]
            norms[number] = torch.linalg.vector_norm(torch.stack(parts))
    squares = torch.stack([norms[number] for number in range(len(gradients))]).square()
    sums = [[part.sum(dtype=torch.float64) for part in _rows(gradient)] for gradient in gradients]
    added = torch.stack([each[0] if len(each) == 1 else torch.stack(each).sum() for each in sums])
    return torch.stack([squares, added], dim=1)


def _norms_at_once(gradients: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the norms in FP64 by position, without those that torch's kernel for many tensors does not read.

    It takes contiguous tensors of one dtype of FP32, BF16 and FP16 (torch 2.11 to 2.14, `ForeachReduceOp.cu`). It is
    private: where it fails, each gradient has a kernel of its own. That is no other verdict, if it is so on one rank
    alone: the norms differ in the order of summation in FP64, by far less than `TOLERANCE`, and nothing is sent here.
    """
    import torch

    found: dict[int, torch.Tensor] = {}
    for dtype in {each.dtype for each in gradients}:
        numbers = [number for number, each in enumerate(gradients) if each.dtype == dtype and each.is_contiguous()]
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            norms = torch._foreach_norm([gradients[number] for number in numbers], 2, dtype=torch.float64)
            found |= dict(zip(numbers, norms, strict=True))
    return found


def _rows(gradient: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of some rows of a gradient each, of about `CHUNK_ON_GPU` elements."""
    import torch

    columns = math.prod(gradient.shape[1:])
    return torch.split(gradient, max(1, CHUNK_ON_GPU // max(1, columns))) if gradient.dim() else [gradient]


def _sums_on_cpu(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the same. torch's own sums in FP64 take 1.4 times as long there."""
    import torch

    sums = torch.zeros(len(gradients), 2, dtype=torch.float64)
    for number, gradient in enumerate(gradients):
        for chunk in torch.split(gradient.reshape(-1), CHUNK):
            exact = chunk.to(torch.float64)
            sums[number] += torch.stack([exact @ exact, exact.sum()])
    return sums


def compare_ranks(fingerprints: Sequence[Fingerprint]) -> list[Failure]:
    """Return the failures that show only between ranks. fingerprints: of all ranks, in order."""
    failures = [] if _share_the_parameters(fingerprints) else _differing([each.gradients for each in fingerprints])
    for ranks in dict.fromkeys(ranks for each in fingerprints for ranks in each.within):
        failures += _differing([each.within.get(ranks, {}) for each in fingerprints if ranks in each.within])
    alone = [{name: sums[:2] for name, sums in each.alone.items()} for each in fingerprints]
    nothing_reduced = not any(each.gradients or each.engine for each in fingerprints)
    if nothing_reduced and (_are_stages(fingerprints) or _are_parts(fingerprints)):
        return []
    if nothing_reduced and (differing := _differing(alone)):
        return differing
    failures += _partly_reduced(fingerprints)
    own_starts = {name for name in fingerprints[0].alone if _starts_differ(name, fingerprints)}
    outside = set(fingerprints[0].outside)
    parts = outside if outside & own_starts and _have_parts_of_their_own(fingerprints) else set()
    shared = [name for name in fingerprints[0].alone if name not in (parts if name in outside else own_starts)]
    # What is the same on all ranks needs no reduction where tensor parallelism divides the layers, and not the data; if
    # the data are other ones, it was reduced in a way that was not seen.
    if _have_other_data(fingerprints) or not any(each.gradients for each in fingerprints):
        shared = [name for name in shared if _differ([sums.get(name) for sums in alone])]
    if shared:
        text = (
            f"coverage: the gradients of {_names(shared)} are not reduced: they belong to no engine, and no collective "
            "had them; asked: every trained parameter in the engine, or reduced by the script"
        )
        advice = "Put them into the wrapped model, or reduce their gradients with torch.distributed.all_reduce"
        failures.append(Failure(FailureKind.WRONG, text, "coverage", advice=advice))
    return failures


def are_the_same(fingerprints: Sequence[Fingerprint]) -> bool:
    """True if gradients that nothing was seen to reduce are the same on all ranks, though the data may differ."""
    alone = [{name: sums[:2] for name, sums in each.alone.items()} for each in fingerprints]
    return bool(alone[0]) and not _differing(alone) and _have_other_data(fingerprints)


def _have_other_data(fingerprints: Sequence[Fingerprint]) -> bool:
    """True if ranks have other data, as losses that differ show, or if that is not known: `torch.func` has no loss."""
    losses = {each.loss for each in fingerprints}
    return len(losses) > 1 or losses == {None}


def _share_the_parameters(fingerprints: Sequence[Fingerprint]) -> bool:
    """True if each rank steps other parameters than the other ranks, as in ZeRO-1 by hand: none is on two ranks."""
    names = [name for each in fingerprints for name in each.gradients]
    return len(names) == len(set(names)) and all(each.gradients for each in fingerprints)


def _are_parts(fingerprints: Sequence[Fingerprint]) -> bool:
    """True if each rank has a part of one model: tensor parallelism of the script.

    Ranks exchange gradients of activations, have one loss in common, and each parameter is another one on each rank, or
    has the same gradient.
    """
    if not all(each.parts for each in fingerprints) or len({each.loss for each in fingerprints}) > 1:
        return False
    names = [name for name in fingerprints[0].alone if not _starts_differ(name, fingerprints)]
    return not any(_differ([each.alone[name][:2] for each in fingerprints if name in each.alone]) for name in names)


def _partly_reduced(fingerprints: Sequence[Fingerprint]) -> list[Failure]:
    """Return a failure if ranks began with the same parameters, and an engine reduces their gradients over some ranks.

    Where ranks exchange activations, each may have a part of one model, and another rank's gradients are of another
    part.
    """
    if any(each.exchanges or each.passes_on for each in fingerprints):
        return []
    ranks = [each.partly for each in fingerprints]
    same = [name for name in ranks[0] if len({sums[name][2] if name in sums else None for sums in ranks}) == 1]
    names = [name for name in same if _differ([sums[name][:2] for sums in ranks])]
    if not names:
        return []
    size, world = fingerprints[0].ranks, len(fingerprints)
    norms = [f"{sums[names[0]][0]:.4g} on rank {rank}" for rank, sums in enumerate(ranks[:4])]
    found = (
        f"the gradients differ between ranks after the step ({_names(names)}: norm {', '.join(norms)}): the process "
        f"group of the wrapper has {size} of {world} ranks"
    )
    advice = (
        "All ranks began with the same weights, which drift apart. Give the wrapper the group of all ranks (the "
        "default)"
    )
    text = f"reduction: {found}; asked: reduced over all"
    return [Failure(FailureKind.WRONG, text, BETWEEN_RANKS, advice=advice, allow=(LOCAL_SGD,))]


def _differing(ranks: Sequence[Mapping[str, tuple[float, ...]]]) -> list[Failure]:
    """Return a failure if gradients that should be the same are not. ranks: norms and sums by name."""
    names = [name for name in ranks[0] if _differ([sums.get(name) for sums in ranks])]
    if not names:
        return []
    norms = [f"{sums[names[0]][0]:.4g} on rank {rank}" for rank, sums in enumerate(ranks[:4]) if names[0] in sums]
    some = f"{_names(names)}: " if len(names) < len(ranks[0]) else ""
    found = f"the gradients differ between ranks after the step ({some}norm {', '.join(norms)})"
    advice = (
        "Each rank trains a model of its own. Call the wrapped model, and run the last backward pass before a step "
        "outside no_sync()"
    )
    text = f"reduction: {found}; asked: reduced over all"
    return [Failure(FailureKind.WRONG, text, BETWEEN_RANKS, advice=advice, allow=(LOCAL_SGD,))]


def _are_stages(fingerprints: Sequence[Fingerprint]) -> bool:
    """True if each rank has a part of a model of its own, and passes on what it computes: a pipeline."""
    if not all(each.passes_on for each in fingerprints):
        return False
    names = [set(each.alone) for each in fingerprints]
    return names[0] != set.intersection(*names) or any(_starts_differ(name, fingerprints) for name in names[0])


def _have_parts_of_their_own(fingerprints: Sequence[Fingerprint]) -> bool:
    """True if ranks can have parts of one model: they exchange what these need, or have one loss in common.

    Where they do not, a part that each has initialized for itself, outside of the engine, is one that was forgotten.
    """
    if any(each.exchanges or each.passes_on for each in fingerprints):
        return True
    nothing_reduced = not fingerprints[0].engine and not fingerprints[0].gradients
    return nothing_reduced or len({each.loss for each in fingerprints}) == 1


def _starts_differ(name: str, fingerprints: Sequence[Fingerprint]) -> bool:
    """True if ranks began with other values of a parameter: each is meant to have its own (experts, shards)."""
    starts = [each.alone[name][2] for each in fingerprints if name in each.alone]
    return any(start != starts[0] for start in starts)


def _differ(sums: Sequence[tuple[float, ...] | None]) -> bool:
    """True if norms and sums differ by more than the order of summation explains."""
    for one, other in itertools.pairwise(sums):
        if one is None or other is None:
            return True
        scale = max(one[0], other[0], 1e-30)
        if any(abs(a - b) > TOLERANCE * max(scale, abs(a), abs(b)) for a, b in zip(one, other, strict=True)):
            return True
    return False


def _names(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
