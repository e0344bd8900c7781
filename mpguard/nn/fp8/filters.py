"""Decide which Linear layers a policy runs in FP8, and why not the others; used by the converter and the proof."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from mpguard.core.errors import PolicyError
from mpguard.policy import hardware, speed
from mpguard.policy.fp8_modules import NONE, entry_for
from mpguard.policy.policy import DEFAULT_FP8_EXCLUDE, FLOAT8_LINEAR, Policy

if TYPE_CHECKING:
    from torch import nn

Named = Sequence[tuple[str, "nn.Module"]]

#: Attributes in which wrappers (FSDP1, torch.compile, activation checkpointing) have the wrapped module.
_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")

#: transformers' Linear with a transposed weight, as in GPT-2.
CONV1D = "transformers.pytorch_utils.Conv1D"

#: The module of transformers in which experts with stacked weights are computed.
EXPERTS = "transformers.integrations.moe"

#: Names of output heads at the top level of a model, in public code (nanoGPT, torchtitan, timm, TransformerLens).
HEAD_NAMES = ("lm_head", "output", "head", "unembed", "out")

#: How a head was found that has one of these names, where the model has no embedding of its size.
BY_NAME = "by its name"

#: Classes whose Linear layers select experts: their few logits decide the expert of every token.
ROUTERS = re.compile(r"(Router|Gate|Gating)$")

#: The reason for a layer to which `fp8_modules` gives the recipe `none`.
NO_RECIPE = "fp8_modules: none"

EXCLUDED, HEAD, ROUTER, END, FP32 = "fp8_exclude", "output head", "MoE router", "first_last_layers_bf16", "fp32_modules"
NARROW = "too narrow to be faster in FP8"


def multiple(recipe: str, backend: str | None) -> int:
    """Return the number that sizes and rows of FP8 matmuls must be multiples of under a recipe."""
    return hardware.needs_of(recipe, backend).multiple


def recipes(modules: Named, policy: Policy) -> dict[int, str]:
    """Return the recipe that a policy has for each Linear layer, by the id of the module; `NONE` keeps it out of FP8.

    A shared module has that of the first entry of `fp8_modules` that matches one of its names.
    """
    base = policy.low_bit_recipe or NONE
    if not policy.fp8_modules:
        return {id(module): base for _, module in modules if is_linear(module)}
    names: dict[int, list[str]] = {}
    for name, module in modules:
        if is_linear(module):
            names.setdefault(id(module), []).append(name)
    entries = {key: entry_for(each, policy.fp8_modules) for key, each in names.items()}
    return {key: base if entry is None else entry.recipe for key, entry in entries.items()}


def reasons(modules: Named, policy: Policy) -> dict[int, str]:
    """Return the reason why each Linear layer must not be FP8, by the id of the module; "" for a layer that may be.

    modules: all named modules, a shared module under each of its names.
    """

    names: dict[int, list[str]] = {}
    for name, module in modules:
        names.setdefault(id(module), []).append(name)
    by_name = dict(modules)
    output_heads = {} if policy.fp8_head else heads(modules)
    ends = in_end_blocks(modules, policy)
    backend = hardware.backend_of(policy.decided(), hardware.detect())
    without_narrow = speed.leaves_out_narrow(policy, backend)
    by_layer = recipes(modules, policy)
    found: dict[int, str] = {}
    for _, module in modules:
        if not is_linear(module) or id(module) in found:
            continue
        own_names = names[id(module)]
        if any(pattern_around(name, policy.fp32_modules) for name in own_names):
            found[id(module)] = FP32
        elif any(matches(name, policy.kept_out_of_fp8) for name in own_names):
            found[id(module)] = EXCLUDED
        elif id(module) in output_heads:
            found[id(module)] = f"{HEAD}: {output_heads[id(module)]}"
        elif any(in_router(name, by_name) for name in own_names):
            found[id(module)] = ROUTER
        elif id(module) in ends:
            found[id(module)] = END
        elif (recipe := by_layer[id(module)]) == NONE:
            found[id(module)] = NO_RECIPE
        else:
            found[id(module)] = (
                _adapter(own_names)
                or _unfit(module, multiple(recipe, backend))
                or _transposed(module, recipe, backend)
                or (NARROW if without_narrow and speed.is_narrow(*sizes_of(module)) else "")
            )
    if policy.fp8_param:
        _keep_shared_exact(modules, found)
    return found


def _keep_shared_exact(modules: Named, found: dict[int, str]) -> None:
    """Exclude layers that share their weight with a module that is not FP8: a weight is in FP8 for all or for none."""
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in modules:
        holders.setdefault(id(module._parameters.get("weight")), []).append((name, module))
    for _, module in modules:
        if found.get(id(module)) == "":
            others = holders[id(module.weight)]
            plain = next(
                (name for name, other in others if found.get(id(other), "other") and not is_converted(other)), None
            )
            if plain is not None:
                found[id(module)] = f"shares its weight with {plain}, which is not FP8"


def is_converted(module: nn.Module) -> bool:
    """True if `convert` has converted a module."""
    return hasattr(module, "_mpguard_fp8")


def others(modules: Named) -> tuple[tuple[str, float], ...]:
    """Return the classes of modules with matrices that are not Linear layers, such as experts, and their shares.

    A share is that of the weights that are multiplied; embeddings are not. Shares below one percent are left out.
    """
    from torch import nn

    sizes: dict[str, int] = {}
    for module in {id(module): module for _, module in modules}.values():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        fp8 = is_linear(module) or is_of(module, "transformer_engine") or is_converted(module)
        kind = "" if fp8 else type(module).__name__
        own = [each for each in module._parameters.values() if each is not None and not nn.parameter.is_lazy(each)]
        shapes = [getattr(each, "ds_shape", each.shape) for each in own]
        sizes[kind] = sizes.get(kind, 0) + sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    total = max(1, sum(sizes.values()))
    return tuple((kind, size / total) for kind, size in sizes.items() if kind and size * 100 >= total)


@functools.lru_cache(maxsize=8192)
def plain_name(name: str) -> str:
    """Return a qualified name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix("module.")


def is_wrapper(module: nn.Module) -> bool:
    """True if a module wraps another one, which has the same name without the parts that wrappers add."""
    return any(part in module._modules for part in _WRAPPERS)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if a qualified name matches one of the patterns."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def pattern_around(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that the name of a module, or of a module around it, matches; None without one."""
    parts = name.split(".") if name else []
    around = [".".join(parts[: length + 1]) for length in range(len(parts))]
    return next((pattern for pattern in patterns if any(fnmatch(each, pattern) for each in around)), None)


def check_patterns(modules: Named, policy: Policy) -> None:
    """Raise `PolicyError` for a pattern of the user that excludes no Linear layer, or that names no module in FP32."""

    for pattern in policy.fp32_modules:
        if not any(pattern_around(name, (pattern,)) for name, _ in modules):
            raise PolicyError(f"fp32_modules: `{pattern}` matches no module")
    linear = [name for name, module in modules if is_linear(module)]
    if policy.fp8_experts:
        linear += [name for name, module in modules if is_experts(module)]
    for pattern in policy.fp8_exclude:
        if pattern in DEFAULT_FP8_EXCLUDE or any(fnmatch(name, pattern) for name in linear):
            continue  # the default patterns may match nothing: not every model has a router
        others = [(name, type(module).__name__) for name, module in modules if fnmatch(name, pattern)]
        if others:
            name, kind = others[0]
            hint = f"it matches {name}, a {kind}; write `{pattern}.*` for the layers in it"
        else:
            hint = f"the first layers are {', '.join(linear[:3])}" if linear else "the model has none"
        raise PolicyError(f"fp8_exclude: `{pattern}` matches no Linear layer; {hint}")


def in_end_blocks(modules: Named, policy: Policy) -> set[int]:
    """Return the ids of the modules in blocks, at the ends of outermost stacks, that stay in the compute dtype."""
    if not policy.first_last_layers_bf16:
        return set()
    start, end = policy.num_layers_at_start_in_bf16, policy.num_layers_at_end_in_bf16
    ends = (block for blocks in stacks(modules) for block in blocks[:start] + blocks[max(0, len(blocks) - end) :])
    return {id(inner) for block in ends for inner in block.modules()}


def stacks(modules: Named) -> list[list[nn.Module]]:
    """Return the outermost stacks of blocks: a ModuleList, or a Sequential of one class, of modules with layers."""
    from torch import nn

    found: list[list[nn.Module]] = []
    inside: set[int] = set()
    for _, module in modules:
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = list(module.children())
        alike = isinstance(module, nn.ModuleList) or len({type(block) for block in blocks}) == 1
        if len(blocks) > 1 and alike and all(map(_has_layers, blocks)):
            found.append(blocks)
            inside.update(id(each) for each in module.modules())
    return found


def _has_layers(block: nn.Module) -> bool:
    """True if a module has submodules, and Linear layers or layers of Transformer Engine among them."""

    return any(is_linear(each) or is_of(each, "transformer_engine") for each in block.modules()) and any(
        True for _ in block.children()
    )


def is_of(module: nn.Module, library: str) -> bool:
    """True if a module's class is one of a library, or derived from one."""
    return any(kind.__module__.startswith(library) for kind in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """True for an `nn.Linear`, and for transformers' `Conv1D`, a Linear with a transposed weight."""
    from torch import nn

    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_experts(module: nn.Module) -> bool:
    """True for a module whose `forward` transformers dispatches to an implementation of experts, or that is converted.

    All its architectures with the stacked weights of all experts do so, through a decorator of the class.
    """
    forward: Any = getattr(type(module), "forward", None)  # TorchScript has none on its classes
    defined = getattr(forward, "__globals__", {}).get("__name__")
    return defined == f"{__package__}.experts" or (defined == EXPERTS and hasattr(module, "config"))


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' `Conv1D`."""
    return any(f"{kind.__module__}.{kind.__name__}" == CONV1D for kind in type(module).__mro__)


def sizes_of(module: Any) -> tuple[int, int]:
    """Return the numbers of features in and out of a Linear or `Conv1D`."""
    return (module.nx, module.nf) if is_conv1d(module) else (module.in_features, module.out_features)


def is_torchao(module: nn.Module) -> bool:
    """True for a float8 module of torchao, and for the `Conv1D` that multiplies as it does."""
    own = tuple(f"{__package__}.torchao_{name}" for name in ("conv1d", "mxfp8", "blockwise"))
    return is_of(module, "torchao.float8") or type(module).__module__ in own


def heads(modules: Named) -> dict[int, str]:
    """Return how each output head was found, by the id of the module.

    A head is a Linear whose weight is an embedding's, or which a Hugging Face model declares; else one outside of the
    stacks of blocks with as many outputs as the largest embedding has rows; without such, one of `HEAD_NAMES` at the
    top level. Modules in the `module` of a wrapper count as at the top level.
    """
    from torch import nn

    linear = {id(module): (name, module) for name, module in modules if isinstance(module, nn.Linear)}
    embeddings = {id(module.weight): (name, module) for name, module in modules if isinstance(module, nn.Embedding)}
    found: dict[int, str] = {}
    for key, (_, layer) in linear.items():
        if (own := id(layer._parameters.get("weight"))) in embeddings:
            found[key] = f"its weight is that of {embeddings[own][0]}"
    for _, module in modules:
        get_head = getattr(type(module), "get_output_embeddings", None)
        with contextlib.suppress(NotImplementedError, AttributeError, TypeError):
            head = get_head(module) if get_head is not None else None
            if head is not None:
                found.setdefault(id(head), f"{type(module).__name__} declares it")
    if found:
        return found
    in_blocks = {id(inner) for blocks in stacks(modules) for block in blocks for inner in block.modules()}
    outside = {key: each for key, each in linear.items() if key not in in_blocks}
    name, largest = max(embeddings.values(), key=lambda each: each[1].num_embeddings, default=("", None))
    if largest is not None:
        found = {
            key: f"as many outputs as {name} has rows"
            for key, each in outside.items()
            if each[1].out_features == largest.num_embeddings
        }
    return found or {key: BY_NAME for key, (name, _) in outside.items() if name in HEAD_NAMES}


def in_router(name: str, by_name: dict[str, nn.Module]) -> bool:
    """True if a module's parent is an MoE router."""
    parent = by_name.get(name.rpartition(".")[0])
    return parent is not None and bool(name) and bool(ROUTERS.search(type(parent).__name__))


def _adapter(names: list[str]) -> str:
    """Return the reason for a layer of a LoRA adapter, else an empty string."""
    return "LoRA adapter" if any(part.startswith("lora_") for name in names for part in name.split(".")) else ""


def _transposed(module: nn.Module, recipe: str, backend: str | None) -> str:
    """Return why a transposed weight cannot be FP8 with a recipe; an empty string if it can, or is not transposed."""
    if not is_conv1d(module):
        return ""
    if recipe not in FLOAT8_LINEAR:
        return f"is a Conv1D, whose transposed weight has no layer for {recipe}"
    if backend == "torchao":
        return ""
    return "is a Conv1D, whose transposed weight only torchao takes: set backend: torchao"


def _unfit(module: nn.Module, multiple: int) -> str:
    """Return why a layer cannot be FP8; an empty string if it can."""
    import torch

    kind = type(module)
    plain = kind is torch.nn.Linear or f"{kind.__module__}.{kind.__name__}" == CONV1D
    if not plain and not hasattr(module, "_mpguard_fp8"):
        if kind.__module__.startswith(("torchao.float8", "transformer_engine")):
            return f"is FP8 already, a {kind.__name__} of {kind.__module__.partition('.')[0]}"
        if hasattr(module, "_get_fsdp_state"):
            return "is sharded by itself already; convert before fully_shard"
        if issubclass(kind, torch.nn.modules.lazy.LazyModuleMixin):
            return "has no sizes yet; run the model once before"
        return f"is a {kind.__name__}, whose own behaviour would be lost"
    if "forward" in vars(module):
        return "has a forward of its own, set on the instance"
    weight = module._parameters.get("weight")
    if weight is None:
        return "has no weight of its own (it is computed, or flattened by FSDP with use_orig_params=False)"
    if weight.is_complex():
        return "has a complex weight"
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"is quantized, its weight is {str(weight.dtype).removeprefix('torch.')}"
    if type(weight) is not torch.nn.Parameter and type(weight).__name__ != "DTensor":
        return f"is quantized, its weight is a {type(weight).__name__}"
    sizes = [size for size in reversed(sizes_of(module)) if size % multiple]
    if sizes:
        predicate = "is not a multiple" if len(sizes) == 1 else "are not multiples"
        return f"{' and '.join(map(str, sizes))} {predicate} of {multiple}"
    return ""
