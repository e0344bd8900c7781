"""The FP8 layers of a model: their library, the layers that are not FP8 with the reason, and the recipe in force."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from mpguard.nn.fp8 import filters
from mpguard.nn.fp8.filters import is_converted, is_linear, is_of, is_torchao, matches, pattern_around
from mpguard.nn.fp8.module_patterns import for_other_models, wrong_patterns
from mpguard.policy.fp8_modules import entry_for
from mpguard.policy.policy import DEFAULT_FP8_EXCLUDE, Policy
from mpguard.runtime.proof.products import short
from mpguard.targets.plugin import get

if TYPE_CHECKING:
    from torch import nn


#: The pattern of the default exclusions that names output heads.
HEADS = tuple(pattern for pattern in DEFAULT_FP8_EXCLUDE if pattern.endswith("lm_head"))

#: The field of `Fp8Layers.recipe` for torchao's gradient matmuls, as torchao's plugin names it.
FAST_ACCUMULATION = "fast_accumulation_in_gradients"


#: What `Fp8Layers.ran_in` calls a recipe that the policy does not have.
OTHER = "other"


@dataclasses.dataclass
class Fp8Layers:
    """The FP8 layers of a model. Plain data.

    The names of the fields are keys of the proof file.

    backend: "te" or "torchao". converted: names of the FP8 layers with a weight matrix.
    left: every other Linear with the reason why it is not FP8; "" if there is no reason.
    against: FP8 layers that the policy excludes.
    recipe: how they are scaled: for torchao the name of its recipe under `recipe`, and `FAST_ACCUMULATION`; for TE the
    class and the fields of the recipe that was in force during forward, empty if there was none.
    ran_in: with `fp8_modules`, number of layers by the policy's recipe in which they ran; `OTHER` for none of them.
    misplaced: layers that ran in another recipe than theirs, with both. patterns: what is wrong with its patterns.
    emulated: True if computed in software. mixed: True if layers differ in that, or in TE's recipe.
    entered: True if they ran inside FP8 autocast (None for torchao, which has none).
    unmatched: the user's patterns that match no module. heads: with `fp8_head`, the output heads, each with the reason
    why it is not FP8; "" if it is.
    kept: number of weights that are kept in FP8, by the class of their quantizer. masters: number of their exact
    values, by dtype. inexact: layers that are trained, and whose exact values no optimizer has.
    beside: FP8 layers whose weights other code multiplied. experts: with `fp8_experts`, the
    modules with experts, each with the reason why it is not FP8; "" if it is.
    calibrated: with `fp8_calibration`, number of layers that began with the scales of their own tensors, or with a
    history from a checkpoint; uncalibrated: those that mpguard has not converted so.
    copies: with `fp8_weight_cache`, number of layers that keep an FP8 copy of their weight; passes, roundings: of such
    a layer since the last step, the most that one had; stale: the largest share of a copy that was not that of its
    weight. uncached: layers that rounded their weights in several passes.
    """

    backend: str
    converted: list[str]
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    against: list[str] = dataclasses.field(default_factory=list)
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    ran_in: dict[str, int] = dataclasses.field(default_factory=dict)
    misplaced: dict[str, str] = dataclasses.field(default_factory=dict)
    patterns: list[str] = dataclasses.field(default_factory=list)
    emulated: bool = False
    mixed: bool = False
    entered: bool | None = None
    unmatched: list[str] = dataclasses.field(default_factory=list)
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    masters: dict[str, int] = dataclasses.field(default_factory=dict)
    inexact: list[str] = dataclasses.field(default_factory=list)
    beside: list[str] = dataclasses.field(default_factory=list)
    heads: dict[str, str] = dataclasses.field(default_factory=dict)
    experts: dict[str, str] = dataclasses.field(default_factory=dict)
    calibrated: int = 0
    uncalibrated: list[str] = dataclasses.field(default_factory=list)
    copies: int = 0
    passes: int = 0
    roundings: int = 0
    stale: float = 0.0
    uncached: list[str] = dataclasses.field(default_factory=list)


def find_fp8_layers(
    modules: list[tuple[str, nn.Module]], policy: Policy, te_recipes: list[dict[str, Any]]
) -> Fp8Layers | None:
    """Return the FP8 layers among named modules; None if there are none.

    te_recipes: the recipe of each call of a Transformer Engine layer; empty for calls outside FP8 autocast.
    """

    layers: dict[str, list[tuple[str, Any]]] = {"torchao": [], "te": []}
    plain: list[tuple[str, Any]] = []
    for name, module in modules:
        if is_torchao(module):
            layers["torchao"].append((name, module))
        elif is_te(module):
            if _has_matrix(module):
                layers["te"].append((name, module))
        elif is_linear(module):
            plain.append((name, module))
    backend = "te" if layers["te"] and not layers["torchao"] else "torchao"
    mixtures = _experts(modules)
    converted = [(name, module) for name, module in mixtures.items() if is_converted(module)]
    if not layers[backend] and not converted:
        return None
    found = Fp8Layers(backend, [name for name, _ in layers[backend]])
    reasons = filters.reasons(modules, policy)
    frozen = {id(module) for _, module in plain if not module.weight.requires_grad}
    found.left = {name: reasons[id(module)] or ("frozen" if id(module) in frozen else "") for name, module in plain}
    if policy.fp8_head:
        heads = filters.heads(modules)
        named = [name for name, module in modules if id(module) in heads or matches(name, HEADS)]
        every = {**found.left, **dict.fromkeys(found.converted, "")}
        found.heads = {name: every[name] for name in named if name in every}
    if policy.fp8_experts:
        _add_experts(found, mixtures, modules, policy)
    if policy.fp8_calibration:
        _add_calibration(found, layers["te"])
    if policy.fp8_weight_cache:
        _add_weight_cache(found, layers["te"])
    ends = filters.in_end_blocks(modules, policy)
    found.against = [
        name
        for name, module in [*layers[backend], *converted]
        if id(module) in ends
        or matches(name, policy.kept_out_of_fp8)
        or pattern_around(name, policy.fp32_modules) is not None
    ]
    _add_recipe_in_force(found, layers["torchao"], converted, te_recipes, policy)
    if policy.fp8_modules:
        _add_recipes(found, layers[backend], modules, policy)
    names = [name for name, _ in modules]
    # The default patterns may match nothing: not every model has a router.
    users = [pattern for pattern in policy.fp8_exclude if pattern not in DEFAULT_FP8_EXCLUDE]
    found.unmatched = [pattern for pattern in users if not any(fnmatch(name, pattern) for name in names)]
    return found


def _add_recipe_in_force(
    found: Fp8Layers,
    layers: list[tuple[str, Any]],
    converted: list[tuple[str, nn.Module]],
    te_recipes: list[dict[str, Any]],
    policy: Policy,
) -> None:
    """Add the recipe of the layers, and if they are emulated. layers: of torchao. converted: experts."""
    if found.backend == "torchao":
        configs = [module.config for _, module in layers]
        plain = [each for each in configs if not hasattr(each, "recipe")]  # the others have no such switch
        emulated = [is_emulated(module) for _, module in [*layers, *converted]]
        found.emulated = all(emulated)
        if configs:
            found.recipe = {
                "recipe": " and ".join(dict.fromkeys(map(torchao_recipe, configs))),
                FAST_ACCUMULATION: bool(plain) and all(map(_accumulates_fast, plain)),
            }
        found.mixed = any(each != found.emulated for each in emulated)
    else:
        inside = [recipe for recipe in te_recipes if recipe]
        found.entered = bool(te_recipes) and len(inside) == len(te_recipes)
        found.recipe = inside[0] if inside else {}
        found.mixed = not policy.fp8_modules and any(recipe != found.recipe for recipe in inside)


def _add_recipes(
    found: Fp8Layers, layers: list[tuple[str, Any]], modules: list[tuple[str, nn.Module]], policy: Policy
) -> None:
    """Add in which recipe each layer ran, as its last forward pass left it, and what is wrong with the patterns."""
    from mpguard.nn.fp8 import experts

    reasons = filters.reasons(modules, policy) | (experts.reasons(modules, policy) if policy.fp8_experts else {})
    found.patterns = wrong_patterns(modules, policy, reasons, for_other_models(policy))
    asked = filters.recipes(modules, policy)
    known = {recipe: _signature(policy.with_recipe(recipe), found.backend) for recipe in policy.recipes}
    counts = Counter[str]()
    for name, module in layers:
        ran = _recipe_of(module, known)
        counts[ran] += 1
        entry = entry_for([name], policy.fp8_modules)  # of a module of the script that is no nn.Linear
        wanted = asked.get(id(module), policy.recipes[0] if entry is None else entry.recipe)
        if ran != wanted:
            found.misplaced[name] = f"{ran}, asked: {wanted}"
    found.ran_in = {recipe: counts[recipe] for recipe in (*known, OTHER) if counts[recipe]}


def _signature(policy: Policy, backend: str) -> dict[str, Any]:
    """Return the fields of a recipe by which layers that ran in it are known."""
    if backend == "torchao":
        return {"recipe": policy.fp8_recipe}
    signature: dict[str, Any] = get("te").build_arguments(policy)
    return signature


def _recipe_of(module: Any, known: dict[str, dict[str, Any]]) -> str:
    """Return the recipe of the policy in which a layer ran; `OTHER` for one that the policy does not have."""
    ran = {"recipe": torchao_recipe(module.config)} if is_torchao(module) else _te_recipe_of(module)
    for recipe, signature in known.items():
        if all(ran.get(field) == value for field, value in signature.items()):
            return recipe
    return OTHER


def _te_recipe_of(module: Any) -> dict[str, Any]:
    """Return class and fields of the recipe of a module of TE in its last forward pass; empty if that was not FP8."""
    recipe = getattr(module, "fp8_meta", {}).get("recipe")
    return _fields(recipe) if recipe is not None and getattr(module, "fp8", False) else {}


def _experts(modules: list[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Return the modules with experts of transformers, by name."""
    return {name: module for name, module in modules if filters.is_experts(module)}


def _add_experts(
    found: Fp8Layers, mixtures: dict[str, nn.Module], modules: list[tuple[str, nn.Module]], policy: Policy
) -> None:
    """Add which experts are FP8. Those without a reason why they are not are among the layers that should be."""
    from mpguard.nn.fp8 import experts

    reasons = experts.reasons(modules, policy)
    found.experts = {name: reasons[id(module)] for name, module in mixtures.items()}
    for name, module in mixtures.items():
        if not is_converted(module) and not found.experts[name]:
            found.left[name] = ""
            del found.experts[name]


def _add_calibration(found: Fp8Layers, layers: list[tuple[str, Any]]) -> None:
    """Add which layers began with the scales of their own tensors.

    A layer that has had no backward pass yet will begin so: it is left out.
    """
    for name, module in layers:
        state = module.__dict__.get("_mpguard_fp8")
        if state is None or not state.policy.fp8_calibration:
            found.uncalibrated.append(name)
        else:
            trained = any(parameter.requires_grad for parameter in module.parameters())
            found.calibrated += state.calibrated_forward and (state.calibrated_backward or not trained)


def _add_weight_cache(found: Fp8Layers, layers: list[tuple[str, Any]]) -> None:
    """Add which layers keep FP8 copies of their weights, and if these are those of the weights."""
    for name, module in layers:
        state = module.__dict__.get("_mpguard_fp8")
        if state is None or (state.passes > 1 and (state.roundings == state.passes or not module.keeps_copy)):
            # Before the first step of an optimizer, weights without a gradient are rounded in each pass.
            if state is None or state.weight_version is None or state.weight_version[0]:
                found.uncached.append(name)
        elif module.keeps_copy:
            found.copies += 1
            found.passes = max(found.passes, state.passes)
            found.roundings = max(found.roundings, state.roundings)
            if state.stale is not None:
                found.stale = max(found.stale, float(state.stale))
                state.stale = None


def add_fp8_weights(found: Fp8Layers, modules: list[tuple[str, nn.Module]], updated: set[int]) -> None:
    """Add which weights are kept in FP8, and their masters. updated: ids of the optimizer's parameters."""
    from mpguard.nn.fp8 import weights

    kept, masters = Counter[str](), Counter[str]()
    for name, module in modules:
        weight: Any = module._parameters.get("weight") if is_te(module) else None
        if not weights.is_kept_in_fp8(weight):
            continue
        kept[type(weight._quantizer).__name__] += 1
        exact = weights.exact_of(weight)
        if exact is not None and exact.mastered:
            masters[short(exact.value.dtype)] += 1
        elif id(weight) in updated:
            found.inexact.append(name)
    found.kept, found.masters = dict(kept), dict(masters)


def _has_matrix(module: nn.Module) -> bool:
    """True for a module of Transformer Engine that multiplies with a weight; false for its norms and its attention.

    FSDP1 on several processes keeps a flat part of each weight between the passes, so shapes do not show it.
    """
    computes = hasattr(module, "fp8_meta")
    own = module.named_parameters(recurse=False)
    return any(parameter.ndim >= 2 or (computes and "weight" in name) for name, parameter in own)


def is_fp8(module: nn.Module) -> bool:
    """True for a module of Transformer Engine, and for a float8 module of torchao."""
    return is_te(module) or is_torchao(module)


def is_emulated(module: nn.Module) -> bool:
    """True for a float8 module of torchao, or experts, that multiply in software."""
    own = bool(getattr(module, "emulated", False)) and is_converted(module)
    return own or (is_torchao(module) and bool(getattr(getattr(module, "config", None), "emulate", False)))


def is_te(module: nn.Module) -> bool:
    """True for a module of Transformer Engine."""
    return is_of(module, "transformer_engine")


def te_recipe_in_force(module: Any) -> dict[str, Any]:
    """Return class and fields of the recipe of a module of TE that has just run; empty outside FP8 autocast."""
    if hasattr(module, "_mpguard_fp8"):  # converted by mpguard: it enters and leaves FP8 autocast in its own forward
        return _fields(module.fp8_meta["recipe"]) if module.fp8 else {}
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is None:
            continue
        if not manager.is_fp8_enabled():
            return {}
        return _fields(manager.get_fp8_recipe())
    return {}


def _fields(recipe: Any) -> dict[str, Any]:
    """Return class and fields of a recipe as plain data."""
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return {"recipe": type(recipe).__name__, **{name: _plain(value) for name, value in fields.items()}}


def _plain(value: Any) -> Any:
    """Return plain data: the name of an enum, the fields of matmul arguments."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "use_split_accumulator"):
        return {"use_split_accumulator": value.use_split_accumulator}
    return getattr(value, "name", None) or repr(value)


def _accumulates_fast(config: Any) -> bool:
    """True if the gradient matmuls of a `Float8LinearConfig` accumulate fast."""
    return bool(config.gemm_config_grad_input.use_fast_accum and config.gemm_config_grad_weight.use_fast_accum)


def torchao_recipe(config: Any) -> str:
    """Return the name of torchao's recipe for a `Float8LinearConfig`, or for the config of a layer of mpguard."""
    if (own := getattr(config, "recipe", None)) is not None:
        return str(own)
    axiswise = "axis" in str(config.cast_config_input.scaling_granularity).lower()
    high = str(config.cast_config_grad_output_for_grad_weight.scaling_type).lower().endswith("disabled")
    return "rowwise_with_gw_hp" if axiswise and high else "rowwise" if axiswise else "tensorwise"
