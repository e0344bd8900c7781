"""FP8 layers put in, and taken out, where the layers stand.

What makes an `nn.Linear` one of a library's FP8 layers is its class and a few attributes: those are
given to the module that is there. So nothing that refers to the module or its parameters (optimizers,
tied layers, hooks, wrappers around the model) has to know.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from types import ModuleType
from typing import cast

import torch
from torch import nn

from mpguard.core.errors import NotCarried, NotInForce, PolicyError
from mpguard.nn import compile as compilation
from mpguard.nn.fp8 import filters, weights
from mpguard.nn.fp8.amax_history import recall_kept
from mpguard.nn.fp8.padding import Padded, Padding, PaddingState
from mpguard.nn.fp8.report import Conversion
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import given
from mpguard.targets.capabilities import FP8_WEIGHTS, SAME_PRODUCTS, fp8_weights
from mpguard.targets.plugin import carriers

#: What a policy may ask of FP8 and converted layers do not have.
NOT_CARRIED = ("fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "fuse")

MARK = "_mpguard_fp8"

#: Why a parameter cannot become another tensor.
HELD = "its weight is in use by DDP, or by a loss that is still there"

#: Backend -> its name as a library, and the version that this was read against.
LIBRARIES = {"te": ("transformer_engine", "2.20"), "torchao": ("torchao", "0.18")}


def convert(model: nn.Module, policy: Policy | str) -> Conversion:
    """Makes the Linear layers of a model FP8 layers, as a policy (or recipe) says. Returns what was done.

    Before or after the optimizer is built, and before or after the model is moved or wrapped by DDP;
    before `torch.compile`, scripting, and `fully_shard` of single layers. Layers stay the same objects with
    the same parameters. Left out, each with its reason: what `fp8_exclude` names, output heads, MoE routers, LoRA
    adapters, quantized layers, other classes, sizes that FP8 products cannot have, blocks at the ends under
    `first_last_layers_bf16`. Called again with the same policy it converts what has been added since.

    Where the policy says so, or `compile: auto` means it (torchao on a GPU), the model is compiled in place: objects,
    names and `state_dict` stay, and what you compile on top of it is compiled once.

    With `fp8_param` the weights themselves are kept in FP8 from then on; the optimizer has to be one that holds FP32
    masters, and their exact values are in them (`mpguard.nn.fp8.weights`). Before DDP, on a GPU.

    Raises `PolicyError` for a policy without FP8, an `fp8_param` that nothing holds, or a pattern that matches nothing,
    `NotInForce` where this machine cannot run it or nothing would be FP8, `MissingExtra` for a library that is not
    installed; the model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise PolicyError(f"convert: {model!r:.60} is no torch.nn.Module; a model is needed")
    policy = given(policy, "convert")
    if policy.low_bit_recipe is None:
        raise PolicyError(f"convert: the policy `{policy.name}` has neither FP8 nor FP4. Set fp8 and fp8_recipe")
    if policy.fp4_param or (policy.fp8_param and fp8_weights(policy, "single") is None):
        field = "fp8_param" if policy.fp8_param else "fp4_param"
        raise PolicyError(
            f"convert: `{policy.name}` has {field}=True; parameters are kept in FP8 as {FP8_WEIGHTS['te']}. "
            f'Say policy.replace({field}=False), as in mpguard.recipe("...").replace({field}=False). {SAME_PRODUCTS}'
        )
    _check(model, policy)
    modules = [(filters.plain_name(name), module) for name, module in model.named_modules(remove_duplicate=False)]
    filters.check_patterns(modules, policy)
    for field in not_carried(policy):
        warnings.warn(NotCarried(field, policy.format_field(field), "convert", carriers(field)), stacklevel=2)
    done = convert_named(model, modules, policy)
    return dataclasses.replace(done, compiled=_compiled(model, policy))


def convert_named(model: nn.Module, modules: filters.Named, policy: Policy) -> Conversion:
    """`convert` for modules under names that may be others than the model's own: without those of wrappers."""
    if policy.first_last_layers_bf16 and not filters.stacks(modules):
        raise PolicyError(
            f"convert: `{policy.name}` keeps blocks at the ends in {policy.compute_dtype}, and the model has no "
            "ModuleList or Sequential of blocks. Name the layers in fp8_exclude, and set first_last_layers_bf16=False"
        )
    reasons = filters.reasons(modules, policy)
    names: dict[int, str] = {}
    layers: dict[int, nn.Linear] = {}
    for name, module in modules:
        if id(module) in reasons and id(module) not in layers:
            names[id(module)], layers[id(module)] = name, cast(nn.Linear, module)
    before = {key: layer for key, layer in layers.items() if MARK in layer.__dict__}
    _check_policy(names, before, policy)
    todo = {key: layer for key, layer in layers.items() if not reasons[key] and key not in before}
    skipped = tuple((names[key], reasons[key]) for key in layers if reasons[key] and key not in before)
    others = filters.others(modules)
    if not todo and not before:
        said = [f"{name or 'the model'}: {reason}" for name, reason in skipped[:5]] or ["it has no Linear layer"]
        said += [f"{kind}, {100 * share:.0f} % of the weights: no Linear layers" for kind, share in others]
        raise NotInForce(f"convert: nothing in the model can be FP8: {'; '.join(said)}")
    backend, library = _library(policy)
    padding = next((layer.__dict__[MARK].padding for layer in before.values()), Padding(filters.multiple(policy)))
    for key, layer in todo.items() if policy.fp8_param else ():
        weights.check(names[key], layer)
    try:
        template = library.templates(policy)
        made = {key: template(layer) for key, layer in todo.items()}  # all of them before the first change
    except (AttributeError, TypeError) as error:
        name, version = LIBRARIES[backend]
        raise NotInForce(
            f"convert: {name} {hardware.detect().libraries.get(backend, 'here')} is not as mpguard knows it "
            f"({type(error).__name__}: {error}). Install {version}, with which this was tested"
        ) from error
    _put_in(
        library.LINEAR,
        [(layer, made[key], PaddingState(names[key], policy, padding)) for key, layer in todo.items()],
    )
    if backend == "te":
        library.around(model, policy)
    return Conversion(
        backend, str(policy.low_bit_recipe), policy.compute_dtype.short, policy.fp8_emulate,
        tuple(names[key] for key in todo), tuple(names[key] for key in before), skipped, others,
        kept=bool(policy.fp8_param),
    )  # fmt: skip


def _put_in(kind: type[Padded], changes: list[tuple[nn.Linear, nn.Module, PaddingState]]) -> None:
    """All changes, or none: raises `PolicyError` where a weight cannot become another tensor."""
    for number, (layer, template, state) in enumerate(changes):
        try:
            set_class(layer, kind, template, state)
        except RuntimeError as error:
            for done, _, _ in changes[:number]:
                restore_class(done)
            name = state.name or "the model"
            raise PolicyError(f"convert: {name}: {HELD}. Convert before DDP, and before a backward pass") from error


def revert(model: nn.Module) -> nn.Module:
    """Takes back what `convert` did: plain `nn.Linear` layers with the same parameters. Returns the model."""
    if not isinstance(model, nn.Module):
        raise PolicyError(f"revert: {model!r:.60} is no torch.nn.Module; a model is needed")
    layers = [module for module in model.modules() if MARK in module.__dict__]
    for layer in layers:
        if not type(layer).__module__.startswith(__package__):
            raise PolicyError(
                f"revert: {layer.__dict__[MARK].name or 'the model'} has become a {type(layer).__name__} since it was "
                "converted. Revert before fully_shard, or others, change the layer"
            )
    for layer in layers:
        try:
            restore_class(cast(nn.Linear, layer))
        except RuntimeError as error:
            name = layer.__dict__[MARK].name or "the model"
            raise PolicyError(
                f"revert: {name}: {HELD}. Revert when they are gone; state_dict() is exact too"
            ) from error
    compilation.undo(model)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if type(owner).__module__ == f"{__package__}.te":
                del hooks[key]
    return model


def not_carried(policy: Policy) -> list[str]:
    return [field for field in NOT_CARRIED if policy.explicit(field)]


def has_others(modules: filters.Named, policy: Policy) -> bool:
    """Whether there are FP8 layers that `convert` has not made, or has under another policy."""
    return any(
        vars(module)[MARK].policy != policy
        if MARK in vars(module)
        else filters.is_of(module, "torchao.float8") or filters.is_of(module, "transformer_engine")
        for _, module in modules
    )


def set_class(layer: nn.Linear, kind: type[Padded], template: nn.Module, state: PaddingState) -> None:
    """Gives a layer another class, the attributes that a template has and it has not, and the template's FP8 weight."""
    weights.to_fp8_weights(layer, template._parameters.get("weight"))
    added = {key: value for key, value in template.__dict__.items() if key not in layer.__dict__}
    layer.__dict__.update(added)
    state.added = tuple(added)
    layer.__dict__[MARK] = state
    layer.__class__ = kind  # type: ignore[assignment]
    recall_kept(layer)


def restore_class(layer: nn.Linear) -> None:
    weights.to_plain_weights(layer)
    for name in (*layer.__dict__[MARK].added, MARK):
        layer.__dict__.pop(name, None)
    layer.__class__ = nn.Linear


def _check(model: nn.Module, policy: Policy) -> None:
    """Raises for what cannot be changed any more, or not be compiled."""
    if reason := compilation.conflict(policy):
        raise PolicyError(f"convert: {reason}")
    if policy.compile is True and (lacking := compilation.missing_requirement(model)):
        raise NotInForce(f"convert: `{policy.name}` has compile=True, and {lacking}")
    for name, module in model.named_modules():
        what = f"convert: {name or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise PolicyError(f"{what} is scripted: its code is fixed. Convert before torch.jit.script or trace")
        if compilation.is_compiled(module) and not compilation.is_ours(module):
            raise PolicyError(f"{what} is compiled. Convert before torch.compile")


def _compiled(model: nn.Module, policy: Policy) -> str:
    """Compiles a model where its policy means it; in words. Empty where that is left to the script."""
    chosen = compilation.wants_compile(policy)
    if not chosen.on:
        return f"off, {chosen.reason}" if chosen.on is False else ""
    if lacking := compilation.missing_requirement(model):
        return f"off, {lacking}, though {chosen.reason}"
    compilation.compile_in_place(model)
    done = any(map(compilation.is_ours, model.modules()))
    return f"on, in place: {chosen.reason}" if done else f"off, nothing here is called, though {chosen.reason}"


def _check_policy(names: dict[int, str], before: dict[int, nn.Linear], policy: Policy) -> None:
    for key, layer in before.items():
        state: PaddingState = layer.__dict__[MARK]
        if state.policy != policy:
            raise PolicyError(
                f"convert: {names[key] or 'the model'} is FP8 already, under `{state.policy.name}`; the policy now is "
                f"`{policy.name}`. Call mpguard.revert(model) first"
            )


def _library(policy: Policy) -> tuple[str, ModuleType]:
    """The backend that is there, and its half of the conversion."""
    here = hardware.detect()
    if lacking := here.refuses(policy):
        raise NotInForce(f"convert: the policy `{policy.name}` does not run here: {lacking}")
    backend = "te" if policy.fp8_param else next(each for each in policy.backends if each in here.libraries)
    if backend not in here.libraries:
        raise NotInForce(
            f"convert: `{policy.name}` has fp8_param=True; parameters in FP8 are Transformer Engine's, which is not "
            "installed. Install it, or set fp8_param=False"
        )
    try:
        return backend, importlib.import_module(f"{__package__}.{backend}")
    except (ImportError, OSError, RuntimeError) as error:
        name, version = LIBRARIES[backend]
        raise NotInForce(
            f"convert: {name} is installed and cannot be imported ({type(error).__name__}: {error}). Install the build "
            f"for this torch and CUDA (tested with {version}), or name another backend than {backend}"
        ) from error
