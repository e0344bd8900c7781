"""Named policies: one small function each, registered with `@register`.

The first recipes, up to `nemotron_3_super_bf16_with_nvfp4_mixed`, are those of Megatron Bridge
(`MIXED_PRECISION_RECIPES` at 067f987), with its values. Names are accepted with `-` or `_`; lists have `_`. Other
packages add recipes through the entry point `mpguard.recipes`, which names a module or package to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpguard.core import entry_points
from mpguard.core.errors import ExtensionError, PolicyError, UnknownRecipe
from mpguard.policy import hardware
from mpguard.policy.policy import Policy

Recipe = Callable[[], Policy]

_RECIPES: dict[str, Recipe] = {}

#: What the names of the policies of `auto` begin with; the recipe that it has selected follows.
AUTO = "auto: "


def register(function: Recipe) -> Recipe:
    """Register a function without arguments that returns a `Policy` as the recipe of the function's name.

    Raises `ExtensionError` if a recipe of another module has that name.
    """
    name = function.__name__.replace("-", "_")
    if not name.isidentifier():
        raise ExtensionError(
            f"{function.__module__}: a recipe is named after its function, and `{name}` is not an identifier. Use `def`"
        )
    other = _RECIPES.get(name)
    if other is not None and other.__module__ != function.__module__:
        raise ExtensionError(f"{function.__module__}: recipe `{name}` is taken by {other.__module__}")
    _RECIPES[name] = function
    return function


def recipe(name: str) -> Policy:
    """Return the policy of a recipe, in either spelling. Raises `UnknownRecipe`, which lists the similar names.

    Parameters in FP8 or FP4 are a wish of a recipe ("auto"); an override makes them a demand.
    """
    if not isinstance(name, str):
        raise PolicyError(f"recipe: {name!r:.60} is not the name of a recipe")
    known = recipes()
    found = known.get(name.replace("-", "_"))
    if found is None:
        raise UnknownRecipe(name, known)
    policy = entry_points.call_extension(f"recipe {name}", found)
    if not isinstance(policy, Policy):
        raise PolicyError(f"recipe `{name}` returned {type(policy).__name__}; a Policy is needed")
    if not policy.name.startswith(AUTO):
        policy = policy.replace(name=name.replace("-", "_"))
    return policy.as_wishes()


def given(policy: Policy | str, to: str) -> Policy:
    """Return the policy that a caller passed to a function, as a policy or as a recipe's name.

    to: the function's name, for the message. Raises `PolicyError` for any other value, and `UnknownRecipe`.
    """
    if isinstance(policy, str):
        return recipe(policy)
    if not isinstance(policy, Policy):
        raise PolicyError(f"{to}: {policy!r:.60} is neither an mpguard.Policy nor the name of a recipe")
    return policy


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in the order of registration: those of mpguard, then those of other packages."""
    entry_points.load("mpguard.recipes")
    return dict(_RECIPES)


def _bf16(**fields: Any) -> Policy:
    return Policy(bf16=True, **fields)


def _fp16(**fields: Any) -> Policy:
    return Policy(fp16=True, **{"grad_reduce_in_fp32": False, **fields})


_DELAYED = {
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "max",
    "fp8_param_gather": True,
}
_CURRENT = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}
_SUBCHANNEL = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
_MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
_NVFP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True}


def _ends(start: int, end: int) -> dict[str, Any]:
    """Return the fields that keep some blocks at the start and at the end in the compute dtype."""
    return {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}


@register
def bf16_mixed() -> Policy:
    """BF16 compute, FP32 master weights, gradients reduced in FP32."""
    return _bf16()


@register
def fp16_mixed() -> Policy:
    """FP16 compute with dynamic loss scaling, FP32 master weights, gradients reduced in FP16."""
    return _fp16()


@register
def bf16_with_fp8_delayed_scaling_mixed() -> Policy:
    """FP8 with scales from a history of 1024 maxima; the rest as bf16_mixed."""
    return _bf16(**_DELAYED)


@register
def fp16_with_fp8_delayed_scaling_mixed() -> Policy:
    """FP8 with scales from a history of 1024 maxima; the rest as fp16_mixed."""
    return _fp16(**_DELAYED)


@register
def bf16_with_fp8_current_scaling_mixed() -> Policy:
    """FP8 with scales from the current maxima, first and last block in BF16; the rest as bf16_mixed."""
    return _bf16(**_CURRENT, **_ends(1, 1))


@register
def fp16_with_fp8_current_scaling_mixed() -> Policy:
    """FP8 with scales from the current maxima, first and last block in FP16; the rest as fp16_mixed."""
    return _fp16(**_CURRENT, **_ends(1, 1))


@register
def nemotron_h_bf16_with_fp8_current_scaling_mixed() -> Policy:
    """bf16_with_fp8_current_scaling_mixed with two blocks at each end in BF16."""
    return _bf16(**_CURRENT, **_ends(2, 2))


@register
def nanov2_bf16_with_fp8_current_scaling_mixed() -> Policy:
    """Block scaling, despite its name (as in Megatron Bridge), with two blocks at each end in BF16."""
    return _bf16(fp8="hybrid", fp8_recipe="blockwise", fp8_param_gather=True, **_ends(2, 2))


@register
def bf16_with_fp8_subchannel_scaling_mixed() -> Policy:
    """FP8 with a scale per block of 128 values; the rest as bf16_mixed."""
    return _bf16(**_SUBCHANNEL)


@register
def fp16_with_fp8_subchannel_scaling_mixed() -> Policy:
    """FP8 with a scale per block of 128 values; the rest as fp16_mixed."""
    return _fp16(**_SUBCHANNEL)


@register
def bf16_with_mxfp8_mixed() -> Policy:
    """MXFP8 (Blackwell): a power-of-two scale per 32 values; the rest as bf16_mixed."""
    return _bf16(**_MXFP8)


@register
def fp16_with_mxfp8_mixed() -> Policy:
    """MXFP8 (Blackwell): a power-of-two scale per 32 values; the rest as fp16_mixed."""
    return _fp16(**_MXFP8)


@register
def bf16_with_nvfp4_mixed() -> Policy:
    """NVFP4 (Blackwell); the rest as bf16_mixed."""
    return _bf16(**_NVFP4)


@register
def nemotron_3_super_bf16_with_nvfp4_mixed() -> Policy:
    """NVFP4 (Blackwell) with the last 14 blocks in BF16."""
    return _bf16(**_NVFP4, **_ends(0, 14))


@register
def fp32() -> Policy:
    """FP32 throughout; TF32 off."""
    return Policy(tf32=False)


@register
def tf32() -> Policy:
    """FP32 with TF32 matmuls on CUDA."""
    return Policy(tf32=True)


@register
def bf16_full() -> Policy:
    """BF16 throughout, without master weights: for optimizers with stochastic rounding or compensated updates."""
    return _bf16(master_dtype="bf16")


@register
def bf16_with_fp8_rowwise_mixed() -> Policy:
    """torchao's `rowwise`: FP8 (E4M3) with a scale per row; the rest as bf16_mixed."""
    return _bf16(fp8="e4m3", fp8_recipe="rowwise")


@register
def bf16_with_fp8_rowwise_with_gw_hp_mixed() -> Policy:
    """torchao's `rowwise_with_gw_hp`: as rowwise, weight gradients in BF16."""
    return _bf16(fp8="e4m3", fp8_recipe="rowwise_with_gw_hp")


@register
def hopper_bf16_with_fp8_mixed() -> Policy:
    """FP8 for H100 and H200: current scaling in every block, compiled where that is faster."""
    return _bf16(fp8="hybrid", fp8_recipe="tensorwise")


@register
def blackwell_bf16_with_mxfp8_mixed() -> Policy:
    """FP8 for B200 and GB200: MXFP8 in every block, parameters in BF16."""
    return _bf16(fp8="e4m3", fp8_recipe="mxfp8")


@register
def auto() -> Policy:
    """The fastest that this machine's GPU supports: FP8 (Hopper, where the model is faster in it), BF16, FP16 or FP32.

    It refuses no model, optimizer or strategy: what one cannot have is left out, and reported.
    """
    return auto_on(hardware.detect())


def auto_on(here: hardware.Hardware) -> Policy:
    """Return the policy of `auto` on some hardware. What a model cannot have of it is left out, and reported."""
    name, _why = hardware.best(here)
    found = recipe(name).decided()
    return found.replace(name=f"{AUTO}{name}", **({"fp8": "auto"} if found.fp8 else {}))
