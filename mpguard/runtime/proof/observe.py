"""`observe`: what a process really does, as plain data.

It combines what a `Recorder` has recorded with what can be read from the model and the optimizer after a
step. Nothing is compared here; `compare` does that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpguard.nn import compile as compilation
from mpguard.nn import cuda_graphs
from mpguard.nn.fp8.filters import BY_NAME, heads, pattern_around, plain_name
from mpguard.policy.policy import Policy
from mpguard.runtime import casts
from mpguard.runtime.containment import contained, report_own_failure
from mpguard.runtime.proof import fp8, reductions, remarks, samples, tf32, trees
from mpguard.runtime.proof.account import Products, steps_around
from mpguard.runtime.proof.autocast_regions import Autocast
from mpguard.runtime.proof.fp32_modules import Fp32Modules, find_fp32_modules
from mpguard.runtime.proof.graphs import WeightUse
from mpguard.runtime.proof.handoffs import Witness
from mpguard.runtime.proof.inferred import ATTENTION, OUTSIDE, UNNAMED, Inferred
from mpguard.runtime.proof.models import models_of, places_of
from mpguard.runtime.proof.optimizer_state import name_first, partition_names, state_dtypes
from mpguard.runtime.proof.products import Work, conversions, short
from mpguard.runtime.proof.recorder import Recorder
from mpguard.runtime.proof.reductions import Fingerprint
from mpguard.runtime.proof.witness import describe
from mpguard.runtime.ranks import idle_ranks, world_size

if TYPE_CHECKING:
    import torch
    from torch import nn

#: The rows of the proof that are observed; `compare` has the processes too, which need no model.
ROWS = (
    "engine", "parameters", "compute", "attention", "frozen parts", "fp8", "fp32 modules", "gradients", "accumulation",
    "reduction", "coverage", "optimizer", "scaler", "buffers", "output", "tf32", "compile", "compile mode",
    "attention mask",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Computed:
    """Matmuls that ran in one place. Plain data; the names of the fields are keys of the proof file.

    trained: True if their results reach a gradient. dtype: of the operands; None if a kernel multiplied that is no
    operator of torch. flops: floating-point operations. module: the qualified name of the module in which they ran;
    None if it is not known. place: the same for messages, with classes. attention: True for attention. inside: True if
    the module is a part of a trained model, and has no trained parameter of its own: without gradients, such a module
    feeds trained ones, while the others are evaluated. by_script: True where the script has switched autocast off, or
    multiplies as a loss does: in_the_loss. evaluated: True in calls of a trained model without gradients. wide_only:
    True in operators that have no 16 bits, such as an FFT. untrained: True if no weight of the module is trained.
    """

    trained: bool
    dtype: str | None
    flops: int
    module: str | None = None
    place: str = ""
    attention: bool = False
    inside: bool = False
    by_script: bool = False
    evaluated: bool = False
    wide_only: bool = False
    untrained: bool = False
    in_the_loss: bool = False


@dataclasses.dataclass
class Observed:
    """One process after an applied optimizer step. Dtypes by short name, counted in elements.

    It describes one optimizer and the parameters that it updates; a process with several has one for each.
    The names of the fields are keys of the proof file.
    """

    #: `single`, `none` (several processes, no wrapper), `ddp`, `fsdp1`, `fsdp2`, `tp` (tensor parallel, without another
    #: engine), `deepspeed-zeroN`.
    engine: str = "single"
    #: The size of the process group; 1 without one, whatever the launcher's variables are.
    world_size: int = 1
    #: The number of processes that the launcher has started.
    launched: int = 1
    #: Ranks of the group that the run declares never to train; they are not in `world_size`.
    idle: int = 0
    #: The device type of the model.
    device: str = "cpu"
    #: The number of the step, applied and skipped ones counted.
    step: int = 0
    #: Steps that were skipped before it.
    skipped: int = 0
    #: True if a loss of the step was NaN or infinite, on this rank.
    loss_not_finite: bool = False
    #: Elements of trained parameters, by dtype.
    parameters: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Elements of parameters that are not trained, by dtype.
    frozen: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Trained parameters that no optimizer has and that the script changes itself: names, by the dtype that has all
    #: their values.
    by_script: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    #: Elements of buffers, by dtype.
    buffers: dict[str, int] = dataclasses.field(default_factory=dict)
    #: The matrix multiplications of the step.
    computed: list[Computed] = dataclasses.field(default_factory=list)
    #: The output heads of the model that have the size of an embedding, if the script computes something in FP32.
    output_heads: list[str] = dataclasses.field(default_factory=list)
    #: Backward passes of the step.
    passes: int = 0
    #: Backward passes in which the matrix multiplications were observed.
    looked_at: int = 0
    #: Why the operators could not be recorded, so that the matrix multiplications are those that autograd's graph
    #: implies; empty if they were recorded.
    inferred: str = ""
    #: The autocast regions of the step; None if they were not recorded.
    autocast: Autocast | None = None
    #: Elements of gradients and of saved activations that were converted to a wider dtype in backward, by the narrower
    #: one.
    widened: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Of these the elements that went to a narrow dtype and back.
    rounded_in_backward: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Elements that were rounded to 16 bits or fewer outside of backward passes, by the dtype and the place.
    casts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    #: The dtype of the last module output.
    output: str | None = None
    #: The class of the optimizer.
    optimizer: str = ""
    #: The first parameter that it updates, and how many more, where the process has, or had, other optimizers.
    updates: str = ""
    #: Elements of the weights that the optimizer updates, by dtype.
    masters: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Elements of their gradients, by dtype.
    gradients: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Elements of their states, by dtype.
    states: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Elements of gradients that were reduced across processes, by dtype.
    reductions: dict[str, int] = dataclasses.field(default_factory=dict)
    #: How the reductions were observed.
    reduced_by: str | None = None
    #: Who has sent gradients of each dtype, see `collectives.origin`.
    sent_by: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    #: The reductions over each dimension of the mesh.
    reductions_over: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    #: Elements that this rank has sent to one other and that are no gradients of parameters, as the stages of a
    #: pipeline do.
    passed_on: int = 0
    #: Elements of gradients of activations that functions of autograd have exchanged with other ranks.
    activations: int = 0
    #: Elements of integers that the script has exchanged, by dtype: they may be bytes of gradients.
    unread: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Elements of the parameters by what reduces their gradients, see `Coverage`.
    covered: dict[str, int] = dataclasses.field(default_factory=dict)
    #: The names of the parameters whose gradients nothing reduces.
    alone: list[str] = dataclasses.field(default_factory=list)
    #: Norm and sum of gradients that must be the same on all ranks; None if they are sharded.
    replicated: tuple[float, float] | None = None
    #: What is compared between ranks.
    fingerprint: Fingerprint | None = None
    #: Elements of gradients that were added to earlier ones, by dtype; of DeepSpeed its setting.
    accumulation: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Backward passes that added to earlier gradients.
    accumulated_passes: int = 0
    #: Sampled parameters whose FP32 values were rounded, between steps or in one, by what they were rounded to.
    rounded_weights: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Sampled parameters the values of whose FP32 states were rounded, by what they were rounded to.
    rounded_states: dict[str, int] = dataclasses.field(default_factory=dict)
    #: The first witness of each row, in words: where it was, and an element before and after.
    witnesses: dict[str, str] = dataclasses.field(default_factory=dict)
    #: True if every backward pass was recorded, and neither they nor what they began from have multiplied matrices.
    without_products: bool = False
    #: False if no parameter of the optimizer is a matrix, and the process has, or had, other optimizers, whose matrix
    #: multiplications are proven.
    matrices: bool = True
    #: Sampled parameters whose FP32 gradients were rounded, by what they were rounded to.
    rounded: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Facts about the loss scaler of the optimizer; None without one.
    scaler: dict[str, Any] | None = None
    #: True if gradients came from a loss that was not scaled by a GradScaler.
    unscaled: bool = False
    #: True if gradients came from a loss that was scaled by a GradScaler.
    scaled: bool = False
    #: The call that has cast parameters to the dtype that they have; empty if none has.
    cast: str = ""
    #: torch's default dtype, in which modules create their parameters.
    default_dtype: str = "fp32"
    #: True if a model is of a library that loads it with `from_pretrained`.
    pretrained: bool = False
    #: The FP8 layers; None if there are none.
    fp8: fp8.Fp8Layers | None = None
    #: True if cuBLAS multiplies FP32 matrices in TF32.
    tf32: bool | None = None
    #: torch's switches for the multiplication of FP32 matrices, see `tf32`.
    fp32_switches: dict[str, str] = dataclasses.field(default_factory=dict)
    #: True if compiled code has run; a model that is compiled at its first call does not count.
    compiled: bool = False
    #: True if a compiled module contains FP8 layers.
    compiled_fp8: bool = False
    #: The modes of `compile_mode` in which modules are compiled; empty for what the script chose.
    compile_modes: list[str] = dataclasses.field(default_factory=list)
    #: Compiled graphs for which Inductor has left out the CUDA graphs that their mode asks for.
    without_cuda_graphs: int = 0
    #: Calls of attention in compiled code by what the kernel takes: `is_causal`, `mask`, `neither`.
    attention_masks: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Fields of the recipe that the run goes without, each with the reason.
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Classes of the modules whose names have no letters, and of their models: `Linear of Sequential`.
    modules: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The modules that compute in FP32; None if the policy has none.
    fp32: Fp32Modules | None = None
    #: What averages the weights of all ranks in place of their gradients, and when.
    averaging: str | None = None
    #: Elements of trained parameters that the script keeps in BF16, as the run allows, by pattern. They count nowhere
    #: else.
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Names of the modules with other trained parameters in BF16, if some are in FP32.
    in_bf16: list[str] = dataclasses.field(default_factory=list)
    #: What loses precision in any policy, see `remarks`.
    remarks: list[remarks.Remark] = dataclasses.field(default_factory=list)
    #: The names of rows that could not be observed because mpguard's own code failed, with its exception.
    errors: dict[str, str] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def observing(self, *rows: str) -> Iterator[None]:
        """Observe what these rows show. If mpguard's own code fails in it, they are not observed."""
        try:
            yield
        except Exception as error:
            report_own_failure(f"the observation of {rows[0]}", error)
            self.errors |= dict.fromkeys(rows, f"{type(error).__name__}: {error}")

    def plain(self) -> dict[str, Any]:
        """Return what the proof file has: without the fingerprint, whose total is `replicated`; work also by dtype."""
        facts = dataclasses.asdict(self)
        del facts["fingerprint"]
        compute: dict[str, int] = {}
        modules: dict[str, list[str]] = {}
        for each in self.computed:
            if each.trained and not each.attention and not each.wide_only and each.dtype:
                compute[each.dtype] = compute.get(each.dtype, 0) + each.flops
                modules.setdefault(each.dtype, []).append(each.module or each.place)
        return {**facts, "compute": compute, "computed_in": modules}


def device_of(module: nn.Module) -> str:
    """Return the device type of the first parameter; `cpu` without parameters."""
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else str(parameter.device.type)


def observe(
    recorder: Recorder,
    models: list[nn.Module],
    optimizer: Any,
    *,
    policy: Policy,
    step: int = 1,
    kept: Sequence[str] = (),
) -> Observed:
    """Return all facts about a process after a step, as plain data.

    models: the models to observe; an empty list is filled with those whose parameters the optimizer updates. policy:
    explains why a layer is not FP8. kept: patterns of modules whose parameters may be in BF16.
    """
    optimizer = innermost(optimizer)
    world, launched = world_size()
    seen = Observed(step=step, world_size=world, launched=launched, idle=idle_ranks())
    seen.output = recorder.output
    with contained("the observation of the loss"):
        seen.loss_not_finite = recorder.gradients.take_not_finite()
    with seen.observing(*ROWS):  # nothing else can be observed without the models
        updated = updated_by(optimizer)
        models += [] if models else models_of(updated)
        roots = list(models)
        aside = _kept_in_bf16(roots, kept)
        modules = [pair for root in roots for pair in trees.named_modules(root)]
        named = [(plain_name(name), module) for name, module in modules]
    if seen.errors:
        return seen
    products = Products()
    with seen.observing("engine"):
        seen.engine = engine_of(roots, recorder, world)
        seen.modules = _classes(roots)
    with seen.observing("parameters", "buffers"):
        _add_parameters(seen, roots, updated, aside)
    with seen.observing("compile"):
        _add_compiled(seen, [module for _, module in modules if compilation.is_compiled(module)])
    seen.attention_masks = dict(recorder.attention_masks)
    with seen.observing("compute", "attention", "frozen parts", "compile"):
        products = recorder.account.products({id(parameter) for parameter in updated})
        _add_computed(seen, recorder, roots, products)
        seen.without_cuda_graphs = cuda_graphs.left_out() if cuda_graphs.MODES & set(seen.compile_modes) else 0
    with seen.observing("optimizer", "gradients"):
        _add_optimizer(seen, recorder, optimizer, roots)
        _set_aside(seen, recorder, optimizer, aside)
    with seen.observing("accumulation"):
        _add_accumulation(seen, recorder, [own for own in updated if id(own) not in aside], roots)
        _add_rounded(seen, recorder, optimizer, roots)
    with seen.observing("reduction", "coverage"):
        _add_reductions(seen, recorder, optimizer, roots)
        _set_reduced_aside(seen)
        _add_fingerprint(seen, recorder, optimizer, roots)
    with seen.observing("scaler"):
        seen.scaler = recorder.scalers.get(id(optimizer))
    with seen.observing("fp8"):
        seen.fp8 = fp8.find_fp8_layers(named, policy, recorder.te_recipes)
        if seen.fp8 is not None:
            _add_uncalled(seen.fp8, modules, products, recorder.weight_uses)
            fp8.add_fp8_weights(seen.fp8, modules, set(map(id, updated)))
    with seen.observing("fp32 modules"):
        seen.fp32 = find_fp32_modules(named, policy, products.inferred.work)
    with seen.observing("tf32"):
        seen.fp32_switches = tf32.read(seen.device)
        seen.tf32 = seen.fp32_switches.get("cuBLAS") == "tf32"
    with contained("the remarks about a step"):
        seen.remarks = list(remarks.remarks(roots, products, places_of(roots), policy))
        seen.remarks += remarks.sixteen_bits(recorder.gradients, products.inferred, optimizer, seen.device)
        if policy.master_dtype.bits > 16:
            seen.remarks += remarks.suspicions(recorder.values, optimizer, step)
    return seen


def _add_parameters(
    seen: Observed, roots: list[nn.Module], updated: list[torch.Tensor], aside: Mapping[int, str]
) -> None:
    """Add the dtypes of parameters and buffers. aside: the ids of those that may be in BF16, with their patterns."""
    for root in roots:
        seen.device = device_of(root)
        trained = (parameter for parameter in trees.parameters(root) if parameter.requires_grad)
        _count_parameters(seen.parameters, (own for own in trained if id(own) not in aside))
        for own in trees.parameters(root):
            if own.requires_grad and id(own) in aside:
                seen.kept[aside[id(own)]] = seen.kept.get(aside[id(own)], 0) + own.numel()
        _count(seen.frozen, (own for own in trees.parameters(root) if not own.requires_grad))
        seen.in_bf16 += _modules_in_bf16(root, aside)
        _count(seen.buffers, root.buffers())
    if not roots:
        _count_parameters(seen.parameters, updated)
    seen.in_bf16 = seen.in_bf16 if "fp32" in seen.parameters else []


def _add_compiled(seen: Observed, compiled: Sequence[nn.Module]) -> None:
    """Add how modules are compiled."""
    seen.compile_modes = sorted({compilation.mode_of(module) for module in compiled})
    seen.compiled_fp8 = any(fp8.is_fp8(inner) for module in compiled for inner in module.modules())


def innermost(optimizer: Any) -> Any:
    """Return the torch optimizer inside the wrappers of accelerate and others."""
    import torch

    while hasattr(optimizer, "optimizer") and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def name_of(optimizer: Any) -> str:
    """Return what an optimizer is called in messages: its class, or what is in the place of one."""
    return str(getattr(optimizer, "mpguard_name", "")) or type(optimizer).__name__


def updated_by(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in getattr(optimizer, "param_groups", None) or [] for parameter in group["params"]]


def engine_of(roots: list[nn.Module], recorder: Recorder, world: int) -> str:
    """Return the engine that distributes the models over processes, from the types of the objects that exist."""
    for candidate in (*recorder.engines, *roots):
        stage = getattr(candidate, "zero_optimization_stage", None)
        if callable(stage) and type(candidate).__module__.startswith("deepspeed"):
            return f"deepspeed-zero{stage()}"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = [module for root in roots for module in trees.modules(root)]
    for name, engine in (("FullyShardedDataParallel", "fsdp1"), ("FSDPModule", "fsdp2")):
        kind = getattr(fsdp, name, None)
        if kind is not None and any(isinstance(module, kind) for module in modules):
            return engine
    if any(type(module).__name__ == "DistributedDataParallel" for module in modules):
        return "ddp"
    if any(shards_of(own) > 1 for root in roots for own in trees.parameters(root)):
        return "tp"
    return "single" if world == 1 else "none"


def shards_of(parameter: torch.Tensor) -> int:
    """Return the number of processes over which a DTensor is distributed; 1 for another tensor."""
    mesh = getattr(parameter, "device_mesh", None)
    return int(mesh.size()) if mesh is not None else 1


def _add_computed(seen: Observed, recorder: Recorder, roots: list[nn.Module], products: Products) -> None:
    """Add the matmuls of the step, by module."""
    seen.passes, seen.looked_at, seen.inferred = products.passes, products.looked_at, products.reason
    seen.unscaled, seen.scaled = products.unscaled, products.scaled
    seen.widened, seen.rounded_in_backward = conversions(products.converted)
    seen.compiled = products.inferred.compiled or bool(recorder.compiled)
    seen.autocast = products.autocast
    if products.reason:
        _add_inferred(seen, recorder, roots, products.inferred)
        return
    places = places_of(roots)
    every = [module for root in roots for module in trees.modules(root)]
    emulated = {id(module) for module in every if fp8.is_emulated(module)}
    weights = {id(each): [own.requires_grad for own in each._parameters.values() if own is not None] for each in every}
    for trained, counted in ((True, products.trained), (False, products.frozen)):
        whole: Counter[Computed] = Counter()
        for ran, flops in counted.items():
            # Emulated FP8 layers multiply in FP32 inside of functions, which dynamo's graphs do not show.
            hidden = emulated and ran.compiled and ran.dtype == "fp32" and "fp32" not in recorder.trained_in_graphs
            work = dataclasses.replace(ran, dtype="fp8") if hidden else _attention_in_parts(ran, recorder)
            for module, part in _modules_of(work, flops, recorder).items():
                name, place = places.get(module) or (None, _unnamed(work, module, products.called or {}))
                inside = name is not None and not any(weights.get(module or 0, ()))
                untrained = module is not None and (name is None or (inside and bool(weights.get(module))))
                dtype = "fp8" if ran.compiled and module in emulated else work.dtype  # emulated experts: BF16
                in_the_loss = work.in_the_loss and name is None
                found = Computed(
                    trained, dtype, 0, name, work.name or place, work.attention, inside, work.by_script or in_the_loss,
                    work.evaluated and not trained, work.wide_only, untrained, in_the_loss,
                )  # fmt: skip
                if scripted := _scripted(work, module, part, recorder):
                    whole[dataclasses.replace(found, by_script=True)] += scripted
                whole[found] += part - scripted
        seen.computed += [dataclasses.replace(found, flops=flops) for found, flops in whole.most_common() if flops]
    recorded = products.looked_at == products.passes > 0
    seen.without_products = recorded and not seen.computed and products.inferred.multiplies_nothing
    for (to, module), elements in products.casts.items():
        place = places.get(module, (None, OUTSIDE if module is None else "other modules"))[1]
        seen.casts.setdefault(to, {})[place] = seen.casts.get(to, {}).get(place, 0) + elements
    if any(each.by_script for each in seen.computed):
        named = [[(plain_name(name), module) for name, module in trees.named_modules(root)] for root in roots]
        seen.output_heads = [
            places[key][0] or "" for each in named for key, why in heads(each).items() if why != BY_NAME
        ]


def _attention_in_parts(ran: Work, recorder: Recorder) -> Work:
    """Return the work of compiled code, as attention's where only attention can have multiplied in FP32.

    Where no attention kernel takes the operands (dropout, a mask), compiled code has the parts of `math` attention,
    which multiplies in FP32, as eager code does. The graphs that dynamo has compiled show whether anything else does.
    """
    parts = (
        ran.compiled and ran.dtype == "fp32" and recorder.attention_masks and "fp32" not in recorder.trained_in_graphs
    )
    return dataclasses.replace(ran, attention=True) if parts else ran


def _add_inferred(seen: Observed, recorder: Recorder, roots: list[nn.Module], inferred: Inferred) -> None:
    """Add the matmuls that graphs imply. Without weights they count only if there are no others."""
    names = {id(parameter): plain_name(name) for root in roots for name, parameter in trees.named_parameters(root)}
    work: Counter[tuple[str, int]] = inferred.work.copy()
    if inferred.compiled:
        for (dtype, _module), size in recorder.compiled.items():
            work[dtype, UNNAMED] += size
    weighted = any(weight != ATTENTION for _, weight in work)
    for (dtype, weight), size in work.most_common():
        name = names[weight].removesuffix(".weight") if weight in names else None
        if weight != ATTENTION or not weighted:
            seen.computed.append(Computed(True, dtype, 2 * size, name, name or "unknown modules", inside=True))


def _modules_of(work: Work, flops: int, recorder: Recorder) -> dict[int | None, int]:
    """Return the work by the id of the module: that of compiled code in the proportions of dynamo's graphs."""
    if not work.compiled or work.module is not None:
        return {work.module: flops}
    graphs = {module: size for (dtype, module), size in recorder.compiled.items() if dtype == work.dtype}
    total = sum(graphs.values())
    return {module: flops * size // total for module, size in graphs.items()} if total else {None: flops}


def _scripted(work: Work, module: int | None, flops: int, recorder: Recorder) -> int:
    """Return the work of a module's matmuls that ran in regions without autocast: of compiled code by its graphs."""
    whole = recorder.compiled.get((work.dtype or "", module), 0) if work.compiled and not work.by_script else 0
    return flops * recorder.compiled_by_script[work.dtype or "", module] // whole if whole else 0


def _unnamed(work: Work, module: int | None, called: Mapping[int, str]) -> str:
    """Return where matmuls ran that are in no module of the trained models. called: classes of modules, by id."""
    if module is not None:
        return f"a {called.get(module, 'module')} whose weights no optimizer has"
    return "compiled code" if work.compiled else "attention" if work.attention else OUTSIDE


def _add_uncalled(
    found: fp8.Fp8Layers,
    modules: list[tuple[str, nn.Module]],
    products: Products,
    in_graphs: Collection[WeightUse],
) -> None:
    """Add the FP8 layers whose weights other code multiplied: in place of calling them, or as well."""
    inferred = products.inferred
    shared = {id(module._parameters.get("weight")) for _, module in modules if not fp8.is_fp8(module)}
    uses: dict[int, list[WeightUse]] = {}
    for use in in_graphs:
        uses.setdefault(use.weight, []).append(use)
    for name, module in modules:
        if not fp8.is_fp8(module):
            continue
        weight = id(module._parameters.get("weight"))
        compiled = uses.get(weight, ())
        if products.called is not None:
            elsewhere = weight in inferred.leaves and id(module) not in products.called
        else:  # no hook of modules sees compiled code
            called = weight in inferred.in_fp8_layers or any(id(module) in use.modules for use in compiled)
            elsewhere = weight in inferred.in_functions and not called
        multiplied = weight in inferred.weights or any(
            use.multiplies and id(module) not in use.modules for use in compiled
        )
        if elsewhere or (multiplied and weight not in shared):
            found.beside.append(plain_name(name))


def _add_optimizer(seen: Observed, recorder: Recorder, optimizer: Any, roots: list[nn.Module]) -> None:
    """Add the dtypes of the optimizer's weights, gradients and states."""
    import torch

    if optimizer is None:
        return
    seen.optimizer = name_of(optimizer)
    if id(optimizer) not in recorder.updated and isinstance(optimizer, torch.optim.Optimizer):
        recorder.record_step(optimizer)
    seen.masters, seen.gradients = map(dict, recorder.updated.get(id(optimizer), ({}, {})))
    flattened = seen.engine not in ("single", "ddp", "none")  # the parameters of other engines
    seen.matrices = flattened or not recorder.several or any(own.ndim > 1 for own in updated_by(optimizer))
    copies = [own for root in roots for own in trees.parameters(root)]
    states = Counter(state_dtypes(optimizer, updated_by(optimizer), copies))
    for around in steps_around(optimizer):
        states |= Counter(state_dtypes(around, updated_by(around), copies))
    seen.states = dict(states)
    dtypes = {id(own): short(own.dtype) for own in updated_by(optimizer)}
    for (call, dtype), modules in recorder.casts.items():
        if any(dtypes.get(id(own)) == dtype for module in modules for own in module.parameters()):
            seen.cast = call
    seen.default_dtype = short(torch.get_default_dtype())
    seen.pretrained = any(hasattr(type(each), "save_pretrained") for root in roots for each in trees.modules(root))
    found = recorder.values.found.get(id(optimizer), [])
    seen.rounded_weights = dict(Counter(each.match.to for each in found if each.row == "weights"))
    names = {id(own): plain_name(name) for root in roots for name, own in trees.named_parameters(root)}
    seen.by_script = recorder.by_hand.found(names)
    seen.rounded_states = dict(Counter(each.match.to for each in found if each.row == "states"))
    _add_witnesses(seen, found, optimizer, roots)
    seen.updates = name_first(updated_by(optimizer), names, roots) if recorder.several else ""


def _kept_in_bf16(roots: list[nn.Module], patterns: Sequence[str]) -> dict[int, str]:
    """Return the ids of the parameters in BF16 of modules that patterns name, each with its pattern."""
    import torch

    found = {}
    for root in roots if patterns else ():
        for name, own in trees.named_parameters(root):
            pattern = pattern_around(plain_name(name), patterns)
            if pattern is not None and own.dtype is torch.bfloat16:
                found[id(own)] = pattern
    return found


def _modules_in_bf16(root: nn.Module, aside: Mapping[int, str]) -> list[str]:
    """Return the names of the modules with trained parameters in BF16 that no pattern names."""
    import torch

    own = ((plain_name(name), each) for name, each in trees.named_parameters(root) if each.dtype is torch.bfloat16)
    names = (name.rpartition(".")[0] or name for name, each in own if each.requires_grad and id(each) not in aside)
    return list(dict.fromkeys(names))


def _set_aside(seen: Observed, recorder: Recorder, optimizer: Any, aside: Mapping[int, str]) -> None:
    """Take parameters that may be in BF16 out of what was observed of an optimizer."""
    masters, gradients, states = map(Counter, (seen.masters, seen.gradients, seen.states))
    for own in updated_by(optimizer) if aside else ():
        made = short(own.grad.dtype) if own.grad is not None else recorder.gradients.made.get(id(own))
        if id(own) in aside and made is not None:
            masters[short(own.dtype)] -= own.numel()
            gradients[made] -= own.numel()
            of_own = types.SimpleNamespace(state={own: getattr(optimizer, "state", {}).get(own)})
            states.subtract(state_dtypes(of_own, [own]))
    if aside:
        seen.masters, seen.gradients, seen.states = dict(+masters), dict(+gradients), dict(+states)


def _set_reduced_aside(seen: Observed) -> None:
    """Take the gradients of parameters that may be in BF16 out of what was reduced, once for each pass."""
    kept = sum(seen.kept.values())
    times = max(1, round(sum(seen.reductions.values()) / max(1, kept + sum(seen.parameters.values()))))
    for counts in (seen.reductions, *seen.reductions_over.values()) if kept else ():
        counts["bf16"] = counts.get("bf16", 0) - times * kept
        if counts["bf16"] <= 0 and len(counts) > 1:
            del counts["bf16"]


def _add_accumulation(seen: Observed, recorder: Recorder, updated: list[torch.Tensor], roots: list[nn.Module]) -> None:
    """Add the dtypes in which gradients were accumulated over backward passes."""
    seen.accumulation, seen.accumulated_passes = recorder.gradients.accumulated_by(updated)
    for engine in (
        *recorder.engines,
        *filter(casts.is_engine, roots),
    ):  # at a later check it is known as the model only
        steps = getattr(engine, "gradient_accumulation_steps", None)
        for name in ("gradient_accumulation_dtype", "grad_acc_dtype"):
            dtype = getattr(engine.optimizer, name, None)
            if dtype is not None and steps is not None and steps() > 1:
                seen.accumulation = {short(dtype): sum(own.numel() for own in updated)}
                seen.accumulated_passes = steps()
                break


def _add_rounded(seen: Observed, recorder: Recorder, optimizer: Any, roots: list[nn.Module]) -> None:
    """Add the gradients of an optimizer, or of no optimizer, that were rounded between two hand-offs."""
    others = {id(own) for other in recorder.gradients.optimizers if other is not optimizer for own in updated_by(other)}
    others -= {id(own) for own in updated_by(optimizer)}
    found = [each for each in recorder.gradients.handoffs.found if each.parameter not in others]
    seen.rounded = dict(Counter(each.match.to for each in found))
    _add_witnesses(seen, found, optimizer, roots)


def _add_witnesses(seen: Observed, found: Sequence[Witness], optimizer: Any, roots: list[nn.Module]) -> None:
    """Add the first witness of each row in words."""
    if not found:
        return
    names = {id(own): f"parameter {number} of {seen.optimizer}" for number, own in enumerate(updated_by(optimizer))}
    names |= {id(own): f"`{plain_name(name)}`" for root in roots for name, own in trees.named_parameters(root)}
    for engine in filter(casts.is_engine, roots):
        names |= partition_names(engine.optimizer, names)
    for each in found:
        name = names.get(each.parameter, "a tensor of no optimizer")
        what = "" if each.row in ("weights", "states") else f"{describe(each.match.to)} "
        seen.witnesses.setdefault(each.row, f"{what}{each.when}: {each.describe(name)}")


def _add_reductions(seen: Observed, recorder: Recorder, optimizer: Any, roots: list[nn.Module]) -> None:
    """Add the dtypes in which gradients were reduced: from the collectives, or from the parameters of DDP."""
    if seen.world_size == 1:
        return
    seen.reductions, seen.reductions_over = reductions.reduced(recorder.gradients, updated_by(optimizer), roots)
    seen.reduced_by = "the collective" if seen.reductions else None
    for origin, dtype, _group in sorted(recorder.gradients.sent):
        seen.sent_by.setdefault(dtype, []).append(origin)
    seen.averaging, seen.passed_on = recorder.averaging, recorder.gradients.passed_on
    seen.activations, seen.unread = recorder.activations, dict(recorder.gradients.unread)
    if seen.engine == "tp" and seen.world_size in {shards_of(own) for root in roots for own in trees.parameters(root)}:
        seen.reduced_by = seen.reduced_by or "tensor parallel"
    if not recorder.listened:
        found, source = reductions.configured(roots)
        seen.reductions, seen.reduced_by = found or seen.reductions, source or seen.reduced_by


def _add_fingerprint(seen: Observed, recorder: Recorder, optimizer: Any, roots: list[nn.Module]) -> None:
    """Add what reduces the gradient of each parameter, and what must be the same on all ranks."""
    if seen.world_size == 1:
        return
    engines = [*recorder.engines, *roots]
    found = reductions.coverage(optimizer, roots, engines, recorder.gradients, recorder.shards.found)
    by_script = {**found.sent, **found.sharded}
    groups = {"ddp": found.replicated, "engine": found.engine, "script": by_script, "alone": found.alone}
    seen.covered = {kind: sum(own.numel() for own in group.values()) for kind, group in groups.items() if group}
    seen.alone = list(found.alone)
    if samples.is_capturing():
        return  # into a CUDA graph: nothing can be read from the device
    seen.fingerprint = reductions.fingerprint(found, recorder.gradients)
    if recorder.activations:  # each rank may have a part of one model
        seen.fingerprint.partly, seen.fingerprint.parts = {}, True
    if sums := seen.fingerprint.gradients.values():
        seen.replicated = sum(norm**2 for norm, _ in sums) ** 0.5, sum(total for _, total in sums)


def _classes(roots: list[nn.Module]) -> dict[str, str]:
    """Return class and model of the modules that a name without letters does not describe, and of their parameters."""
    classes = {}
    for root in roots:
        for name, module in trees.named_modules(root):
            if (plain := plain_name(name)) and not any(map(str.isalpha, plain)):
                classes[plain] = f"{type(module).__name__} of {type(root).__name__}"
    return classes


def _count_parameters(counter: dict[str, int], parameters: Iterable[torch.Tensor]) -> None:
    """Count elements by dtype; parameters kept in FP8, whose `dtype` is that of their exact values, count as fp8."""
    from mpguard.nn.fp8.weights import is_kept_in_fp8

    own = list(parameters)
    _count(counter, (each for each in own if not is_kept_in_fp8(each)))
    if kept := sum(each.numel() for each in own if is_kept_in_fp8(each)):
        counter["fp8"] = counter.get("fp8", 0) + kept


def _count(counter: dict[str, int], tensors: Any) -> None:
    """Count the elements of floating-point tensors by dtype."""
    for tensor in tensors:
        if tensor.is_floating_point():
            # Parameters partitioned by ZeRO-3 are empty between uses; `ds_numel` is their real size.
            dtype = short(tensor.dtype)
            counter[dtype] = counter.get(dtype, 0) + int(getattr(tensor, "ds_numel", tensor.numel()))
