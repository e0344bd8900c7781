"""Convert Linear layers to FP8 layers in place, and revert them.

An `nn.Linear` and a library's FP8 layer differ in their class and a few attributes, so the existing module gets these.
References to the module or its parameters (in optimizers, tied layers, hooks, wrappers around the model) stay valid.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections import Counter
from types import ModuleType
from typing import cast

import torch
from torch import nn

from mpguard.core.errors import NotCarried, NotInForce, PolicyError
from mpguard.nn import compile as compilation
from mpguard.nn import fp32
from mpguard.nn.fp8 import experts, filters, observation, weights
from mpguard.nn.fp8.amax_history import restore_pending
from mpguard.nn.fp8.module_patterns import note_matches, wrong_patterns
from mpguard.nn.fp8.padding import Padded, Padding, PaddingState
from mpguard.nn.fp8.report import Conversion
from mpguard.policy import hardware
from mpguard.policy.policy import FLOAT8_LINEAR, Policy
from mpguard.policy.recipes import given
from mpguard.targets.capabilities import FP8_WEIGHTS, SAME_PRODUCTS, fp8_weights
from mpguard.targets.plugin import carriers

#: Fields about FP8 that converted layers do not implement.
NOT_CARRIED = ("fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "fuse")

MARK = "_mpguard_fp8"

#: Why a parameter cannot be exchanged with another tensor.
IN_USE = "its weight is in use by DDP, or by a loss that still exists"

#: Backend -> the name of its library, and the version that this code was written for.
LIBRARIES = {"te": ("transformer_engine", "2.20"), "torchao": ("torchao", "0.18")}


def convert(model: nn.Module, policy: Policy | str) -> Conversion:
    """Convert the Linear layers of a model to FP8 layers, according to a policy (or recipe). Returns a report.

    Call it before or after the optimizer is built, and before or after the model is moved or wrapped by DDP; but before
    `torch.compile`, scripting, and `fully_shard` of single layers. Layers stay the same objects with the same
    parameters. Not converted, each with a reason in the report: layers that `fp8_exclude` names, output heads, MoE
    routers, LoRA adapters, quantized layers, layers of other classes, sizes that FP8 matmuls do not support, blocks at
    the ends under `first_last_layers_bf16`, and modules that `fp32_modules` names, which compute in FP32. A second call
    with the same policy converts layers that were added since. `fp8_modules` gives layers other recipes, or none.

    If the policy has `compile: true`, or `compile: auto` selects it (torchao on a GPU), the model is compiled in place:
    objects, names and `state_dict` do not change, and if you compile the model too, it is compiled only once.

    With `fp8_param=True` the weights themselves are stored in FP8 from then on; the optimizer must be one with FP32
    master weights, which have the exact values (`mpguard.nn.fp8.weights`). Convert before DDP, on a GPU. Here, where no
    optimizer is known, "auto" is off.

    Raises `PolicyError` for a policy without FP8, an `fp8_param` that no library supports, or a pattern that matches no
    layer; `NotInForce` if this machine cannot run the policy or no layer would be FP8; `MissingExtra` for a library
    that is not installed. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise PolicyError(f"convert: {model!r:.60} is not a torch.nn.Module; a model is needed")
    policy = given(policy, "convert")
    if policy.low_bit_recipe is None:
        raise PolicyError(f"convert: the policy `{policy.name}` has neither FP8 nor FP4. Set fp8 and fp8_recipe")
    policy = policy.decided()
    if policy.fp4_param or (policy.fp8_param and fp8_weights(policy, "single") is None):
        field = "fp8_param" if policy.fp8_param else "fp4_param"
        raise PolicyError(
            f"convert: `{policy.name}` has {field}=True; parameters are kept in FP8 as {FP8_WEIGHTS['te']}. "
            f'Use policy.replace({field}=False), as in mpguard.recipe("...").replace({field}=False). {SAME_PRODUCTS}'
        )
    _check(model, policy)
    modules = [(filters.plain_name(name), module) for name, module in model.named_modules(remove_duplicate=False)]
    filters.check_patterns(modules, policy)
    if policy.fp8_modules and (wrong := wrong_patterns(modules, policy, _reasons(modules, policy))):
        raise PolicyError(f"convert: fp8_modules: {'; '.join(wrong)}")
    for field in not_carried(policy):
        warnings.warn(NotCarried(field, policy.format_field(field), "convert", carriers(field)), stacklevel=2)
    done = convert_named(model, modules, policy)
    fp32.keep(modules, policy)
    return dataclasses.replace(done, compiled=_compiled(model, policy))


def convert_named(model: nn.Module, modules: filters.Named, policy: Policy) -> Conversion:
    """Implement `convert` for modules with given names, which are the model's own without the parts of wrappers."""
    if policy.first_last_layers_bf16 and not filters.stacks(modules):
        raise PolicyError(
            f"convert: `{policy.name}` keeps blocks at the ends in {policy.compute_dtype}, and the model has no "
            "ModuleList or Sequential of blocks. Name the layers in fp8_exclude, and set first_last_layers_bf16=False"
        )
    note_matches(modules, policy)
    of_experts = experts.reasons(modules, policy) if policy.fp8_experts else {}
    reasons, recipes = {**filters.reasons(modules, policy), **of_experts}, filters.recipes(modules, policy)
    names: dict[int, str] = {}
    layers: dict[int, nn.Linear] = {}
    for name, module in modules:
        if id(module) in reasons and id(module) not in layers:
            names[id(module)], layers[id(module)] = name, cast(nn.Linear, module)
    before = {key: layer for key, layer in layers.items() if MARK in layer.__dict__}
    _check_policy(names, before, policy)
    new = {key: layer for key, layer in layers.items() if not reasons[key] and key not in before}
    todo = {key: layer for key, layer in new.items() if key not in of_experts}
    left = {key: reasons[key] for key in layers if reasons[key] and key not in before}
    if not new and not before:
        raise _nothing_fits([(names[key], reason) for key, reason in left.items()], modules)
    libraries = {recipe: _library(policy, recipe) for recipe in policy.recipes}
    backend, library = libraries[policy.recipes[0]]
    paddings = {layer.__dict__[MARK].padding.multiple: layer.__dict__[MARK].padding for layer in before.values()}
    for key, layer in todo.items() if policy.fp8_param else ():
        weights.check(names[key], layer)
    modules_of = {recipe: module for recipe, (_, module) in libraries.items()}
    prepared = _prepared(policy, backend, modules_of, {key: (layer, recipes[key]) for key, layer in todo.items()})

    def state(key: int) -> PaddingState:
        multiple = filters.multiple(recipes.get(key, policy.recipes[0]), backend)
        padding = paddings.setdefault(multiple, Padding(multiple))
        return PaddingState(names[key], policy, padding, plain=type(layers[key]))

    _convert_all([(layer, *prepared[key], state(key)) for key, layer in todo.items()])
    for key in new.keys() - todo.keys():
        experts.convert(layers[key], state(key))
    if backend == "te":
        library.around(model, policy)
    inside = Counter(recipes[key] for key in (*todo, *before) if key not in of_experts)
    return Conversion(
        backend, _by_recipe(policy, inside), policy.compute_dtype.short, policy.fp8_emulate,
        tuple(names[key] for key in todo), tuple(names[key] for key in before if key not in of_experts),
        tuple((names[key], reason) for key, reason in left.items() if key not in of_experts),
        filters.others(modules), kept=bool(policy.fp8_param),
        experts=tuple((names[key], "" if key in before else reason) for key, reason in of_experts.items()),
        more=experts.hint(modules, policy),
    )  # fmt: skip


def _nothing_fits(left: list[tuple[str, str]], modules: filters.Named) -> NotInForce:
    """Return the error for a model without a layer that can be FP8. left: its layers, with the reason."""
    why = [f"{name or 'the model'}: {reason}" for name, reason in left[:5]] or ["it has no Linear layer"]
    why += [f"{kind}, {100 * share:.0f} % of the weights: no Linear layers" for kind, share in filters.others(modules)]
    return NotInForce(f"convert: nothing in the model can be FP8: {'; '.join(why)}")


def _by_recipe(policy: Policy, inside: Counter[str]) -> str:
    """Return the recipe of the layers as text; with `fp8_modules` the number of layers of each."""
    if not policy.fp8_modules:
        return policy.recipes[0]
    return ", ".join(f"{inside[each]} {each}" for each in policy.recipes if inside[each])


def _prepared(
    policy: Policy, backend: str, libraries: dict[str, ModuleType], layers: dict[int, tuple[nn.Linear, str]]
) -> dict[int, tuple[type[Padded], nn.Module]]:
    """Return the class and a template for each layer, with its recipe: all are created before the first change."""
    used = dict.fromkeys(recipe for _, recipe in layers.values())
    try:
        templates = {
            recipe: each.templates(policy.with_recipe(recipe)) for recipe, each in libraries.items() if recipe in used
        }
        return {
            key: (libraries[recipe].kind_of(layer), templates[recipe](layer)) for key, (layer, recipe) in layers.items()
        }
    except (AttributeError, TypeError) as error:
        name, version = LIBRARIES[backend]
        raise NotInForce(
            f"convert: {name} {hardware.detect().libraries.get(backend, 'here')} has another interface than expected "
            f"({type(error).__name__}: {error}). Install {version}, with which mpguard is tested"
        ) from error


def _reasons(modules: filters.Named, policy: Policy) -> dict[int, str]:
    """Return why Linear layers, and with `fp8_experts` experts, must not be FP8, by id; "" for those that may be."""
    of_experts = experts.reasons(modules, policy) if policy.fp8_experts else {}
    return {**filters.reasons(modules, policy), **of_experts}


def _convert_all(changes: list[tuple[nn.Linear, type[Padded], nn.Module, PaddingState]]) -> None:
    """Apply all changes, or none. Raises `PolicyError` if a weight cannot be exchanged with another tensor."""
    for number, (layer, kind, template, state) in enumerate(changes):
        try:
            set_class(layer, kind, template, state)
        except RuntimeError as error:
            for done, *_ in changes[:number]:
                restore_class(done)
            name = state.name or "the model"
            raise PolicyError(f"convert: {name}: {IN_USE}. Convert before DDP, and before a backward pass") from error


def revert(model: nn.Module) -> nn.Module:
    """Undo `convert`: plain `nn.Linear` layers with the same parameters. Returns the model."""
    if not isinstance(model, nn.Module):
        raise PolicyError(f"revert: {model!r:.60} is not a torch.nn.Module; a model is needed")
    plain_layers(model)
    compilation.undo(model)
    fp32.release(model)
    return model


def plain_layers(model: nn.Module) -> None:
    """Make plain layers of all that `convert` has converted, with the same parameters. Raises `PolicyError`."""
    layers = [module for module in model.modules() if MARK in module.__dict__]
    for layer in layers:
        if not type(layer).__module__.startswith(__package__):
            raise PolicyError(
                f"revert: {layer.__dict__[MARK].name or 'the model'} has become a {type(layer).__name__} since it was "
                "converted. Revert before fully_shard, or other code, changes the layer"
            )
    for layer in layers:
        try:
            restore_class(cast(nn.Linear, layer))
        except RuntimeError as error:
            name = layer.__dict__[MARK].name or "the model"
            raise PolicyError(
                f"revert: {name}: {IN_USE}. Revert when these are gone; state_dict() is exact too"
            ) from error
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if type(owner).__module__ == f"{__package__}.te":
                del hooks[key]


def not_carried(policy: Policy) -> list[str]:
    """Return the fields of a policy that converted layers do not implement."""
    return [field for field in NOT_CARRIED if policy.explicit(field)]


def has_others(modules: filters.Named, policy: Policy) -> bool:
    """True if there are FP8 layers that `convert` has not converted, or has under another policy."""
    return any(
        vars(module)[MARK].policy != policy
        if MARK in vars(module)
        else filters.is_torchao(module) or filters.is_of(module, "transformer_engine")
        for _, module in modules
    )


def set_class(layer: nn.Linear, kind: type[Padded], template: nn.Module, state: PaddingState) -> None:
    """Give a layer another class, the attributes of a template that it lacks, and the template's FP8 weight."""
    weights.to_fp8_weights(layer, template._parameters.get("weight"))
    added = {key: value for key, value in template.__dict__.items() if key not in layer.__dict__}
    layer.__dict__.update(added)
    state.added = tuple(added)
    state.key = observation.key_of(layer)
    layer.__dict__[MARK] = state
    layer.__class__ = kind  # type: ignore[assignment]
    restore_pending(layer)


def restore_class(layer: nn.Linear) -> None:
    """Undo `set_class`."""
    weights.to_plain_weights(layer)
    state: PaddingState = layer.__dict__[MARK]
    for name in (*state.added, MARK):
        layer.__dict__.pop(name, None)
    layer.__class__ = state.plain  # type: ignore[assignment]


def keep_plain_weights(model: nn.Module) -> None:
    """Convert the weights of a model that are stored in FP8 back to plain ones, with the exact values."""
    for layer in model.modules():
        if MARK in layer.__dict__ and weights.exact_of(layer._parameters.get("weight")) is not None:
            weights.to_plain_weights(cast(nn.Linear, layer))
            state: PaddingState = layer.__dict__[MARK]
            state.policy = state.policy.replace(fp8_param=False, name=state.policy.name)


def _check(model: nn.Module, policy: Policy) -> None:
    """Raise an error for a model that cannot be converted any more, or not be compiled."""
    if reason := compilation.conflict(policy):
        raise PolicyError(f"convert: {reason}")
    if policy.compile is True and (missing := compilation.missing_requirement(model)):
        raise NotInForce(f"convert: `{policy.name}` has compile=True, and {missing}")
    for name, module in model.named_modules():
        what = f"convert: {name or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise PolicyError(f"{what} is scripted: its code is fixed. Convert before torch.jit.script or trace")
        if compilation.is_compiled(module) and not compilation.is_compiled_in_place(module):
            raise PolicyError(f"{what} is compiled. Convert before torch.compile")


def _compiled(model: nn.Module, policy: Policy) -> str:
    """Compile a model if its policy requires it. Returns the report's line, empty if the script decides."""
    chosen = compilation.wants_compile(policy)
    if not chosen.on:
        return f"off, {chosen.reason}" if chosen.on is False else ""
    if missing := compilation.missing_requirement(model):
        return f"off, {missing}, though {chosen.reason}"
    compilation.compile_in_place(model, None if policy.compile is True else _warn_not_compiled)
    done = any(map(compilation.is_compiled_in_place, model.modules()))
    how = f"in place{compilation.by_block(model)}"
    return f"on, {how}: {chosen.reason}" if done else f"off, nothing here is called, though {chosen.reason}"


def _warn_not_compiled(failure: str) -> None:
    warnings.warn(f"mpguard: compile: auto is off here: {failure}, and runs as it is", stacklevel=2)


def _check_policy(names: dict[int, str], before: dict[int, nn.Linear], policy: Policy) -> None:
    """Raise `PolicyError` for a layer that is FP8 already, under another policy."""
    for key, layer in before.items():
        state: PaddingState = layer.__dict__[MARK]
        if state.policy != policy:
            raise PolicyError(
                f"convert: {names[key] or 'the model'} is FP8 already, under `{state.policy.name}`; the policy now is "
                f"`{policy.name}`. Call mpguard.revert(model) first"
            )


def _library(policy: Policy, recipe: str) -> tuple[str, ModuleType]:
    """Return the backend that is installed, and the module that implements its layer for a recipe of the policy."""
    here = hardware.detect()
    if reason := here.refuses_low_bits(policy):
        raise NotInForce(f"convert: the policy `{policy.name}` does not run here: {reason}")
    backend = hardware.backend_of(policy, here)
    assert backend is not None  # else the hardware refuses the policy
    if backend not in here.libraries:
        field = "fp8_param" if policy.fp8_param else "fp8_weight_cache"
        raise NotInForce(
            f"convert: `{policy.name}` has {field}=True; that is Transformer Engine's, which is not installed. "
            f"Install it, or set {field}=False"
        )
    try:
        own = backend == "torchao" and recipe not in FLOAT8_LINEAR
        module = f"{backend}_{recipe}" if own else backend
        return backend, importlib.import_module(f"{__package__}.{module}")
    except (ImportError, OSError, RuntimeError) as error:
        name, version = LIBRARIES[backend]
        raise NotInForce(
            f"convert: {name} is installed and cannot be imported ({type(error).__name__}: {error}). Install the build "
            f"for this torch and CUDA (tested with {version}), or set another backend than {backend}"
        ) from error
