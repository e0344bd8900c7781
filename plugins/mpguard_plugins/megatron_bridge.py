"""Megatron Bridge: the YAML that overrides its `ConfigContainer`.

Written for Megatron Bridge 067f987 (2026-08-22). `mixed_precision` names one of its recipes, or is a section with the
fields of `MixedPrecisionConfig` (target `megatron`). At the start of a run it overwrites the fields of the same names
in `model`, `optimizer` and `ddp`, which it logs at debug level only. A recipe per module is `model.quant_recipe`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mpguard import PolicyError, UnknownRecipe, recipe
from mpguard.policy import Dtype, Policy
from mpguard.targets import ABSENT, Setting, Settings, get, lookup, plugin
from mpguard_plugins.megatron import modules_of, quant_recipe

#: The recipes of Megatron Bridge, which mpguard has under the same names.
RECIPES = (
    "bf16_mixed", "fp16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "fp16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed", "fp16_with_fp8_current_scaling_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed", "nanov2_bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed", "fp16_with_fp8_subchannel_scaling_mixed", "bf16_with_mxfp8_mixed",
    "fp16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed",
)  # fmt: skip
_DTYPES = ("params_dtype", "pipeline_dtype", "autocast_dtype")
_SECTION = "mixed_precision"
_QUANT_RECIPE = "model.quant_recipe"
_RECIPE_CONFIG = "megatron.core.quantization.quant_config.RecipeConfig.from_config_dict"
_TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
#: Fields that `mixed_precision` overwrites in other sections, with the sections that have them.
_OVERWRITTEN = {
    "bf16": ("model", "optimizer"), "fp16": ("model", "optimizer"), "params_dtype": ("model", "optimizer"),
    "fp8": ("model",), "fp8_recipe": ("model", "optimizer"), "fp4": ("model",), "grad_reduce_in_fp32": ("ddp",),
}  # fmt: skip


@plugin("megatron-bridge", carries=tuple(sorted({*get("megatron").carries, "fp8_modules"})))
def megatron_bridge(policy: Policy, _strategy: str | None) -> Settings:
    """The YAML overrides of Megatron Bridge: `mixed_precision`, and no other value in what it overwrites.

    `fp8_modules` is `model.quant_recipe`, an object that hydra's `instantiate` creates. Its patterns are compared with
    Megatron's own names. The parameters of these layers are kept in the compute dtype.
    """
    if policy.fp8_modules and policy.fp8_param is True:
        raise PolicyError(
            "megatron-bridge: fp8_param is True with fp8_modules; Megatron keeps no parameters in FP8 in layers "
            "with a recipe of their own. Set fp8_param to False"
        )
    value = _recipe_of(policy) or _section(policy)
    settings: dict[str, Any] = {_SECTION: Setting(value, equivalent=lambda found: _means(found, policy))}
    for name, sections in _OVERWRITTEN.items():
        wanted = getattr(policy, name)
        for section in sections:
            settings[f"{section}.{name}"] = Setting(
                ABSENT, "mixed_precision overwrites it", equivalent=functools.partial(_agrees, wanted)
            )
    if policy.low_bit_recipe:  # without FP8 Megatron does not check it
        settings[_QUANT_RECIPE] = _quant_recipe(policy)
    return settings


def _quant_recipe(policy: Policy) -> Setting:
    """Return the setting of a recipe per module. Without one the key must be absent: it would change the recipe."""
    if not policy.fp8_modules:
        return Setting(ABSENT, "the policy has one recipe for all layers", equivalent=lambda found: found is None)
    wanted: dict[str, Any] = {"_target_": _RECIPE_CONFIG, "config": quant_recipe(policy)}

    def same(found: Any) -> bool:
        return _equal(found, wanted) and [*found["config"]["matchers"]] == [*wanted["config"]["matchers"]]

    return Setting(wanted, equivalent=same)


def _equal(found: Any, wanted: Any) -> bool:
    return Setting(wanted).met_by(found)


def _recipe_of(policy: Policy) -> str | None:
    """Return the recipe of Megatron Bridge that a policy is, as Megatron sees it; None if it is none."""
    fields = _fields(policy)
    return next((name for name in (policy.name, *RECIPES) if name in RECIPES and _named()[name] == fields), None)


@functools.cache
def _named() -> Mapping[str, Mapping[str, Any]]:
    return {name: _fields(recipe(name)) for name in RECIPES}


def _fields(policy: Policy) -> dict[str, Any]:
    return {key: setting.value for key, setting in get("megatron").settings(policy).items()}


def _section(policy: Policy) -> dict[str, Any]:
    """Return a policy as a section with the fields of `MixedPrecisionConfig` that are not at their defaults."""
    defaults = _fields(Policy())
    found = {
        key: value
        for key, value in _fields(policy).items()
        if value is not ABSENT and (key in _DTYPES or value != defaults[key]) and (key != "fp32" or value)
    }
    # hydra's `instantiate` makes dtypes of sections.
    return {"_target_": _TARGET, **{key: _written(value) if key in _DTYPES else value for key, value in found.items()}}


def _written(dtype: str) -> dict[str, Any]:
    """Return a dtype as a config of Megatron Bridge has it, for hydra's `instantiate`."""
    return {"_target_": f"torch.{Dtype.parse(dtype).torch_name}", "_call_": False}


def _dtype(found: Any) -> Dtype | None:
    name = found.get("_target_") if isinstance(found, Mapping) else found
    return Dtype.spelled(str(name))


def _agrees(wanted: Any, found: Any) -> bool:
    """True if a value in another section says what `mixed_precision` will write there."""
    return _dtype(found) is wanted if isinstance(wanted, Dtype) else found == wanted and type(found) is type(wanted)


def _means(found: Any, policy: Policy) -> bool:
    """True if a value of `mixed_precision` is a name, or a section, of a policy."""
    if isinstance(found, str):
        return _named().get(found.replace("-", "_")) == _fields(policy)
    if not isinstance(found, Mapping):
        return False
    try:
        return _fields(Policy.of(get("megatron").read(_plain(found)))) == _fields(policy)
    except PolicyError:
        return False


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `MixedPrecisionConfig`, with dtypes as names."""
    plain = {name: value for name, value in section.items() if not name.startswith("_")}
    for name in _DTYPES:
        if isinstance(plain.get(name), Mapping):
            plain[name] = plain[name].get("_target_")
    return plain


@megatron_bridge.detector
def is_config(config: Mapping[str, Any]) -> bool:
    """True for sections of a `ConfigContainer`, `train` or `mixed_precision` among them."""
    if {"distributed_type", "compute_environment", "trainer", "defaults", "actor_rollout_ref"} & config.keys():
        return False
    names = {"model", "train", "optimizer", "ddp", "scheduler", "checkpoint", "dist", "logger", "rng", "dataset"}
    sections = {name for name in names if isinstance(config.get(name), Mapping)}
    precision = config.get(_SECTION, ...)
    # "fp32" or "bf16" stand in configs of many programs; Bridge's names have "_" or "-", interpolations "${".
    named = isinstance(precision, str) and not precision.isalnum()
    own = precision is None or isinstance(precision, Mapping) or named
    trains = "train" in sections and (bool(sections & {"ddp", "dist", "rng"}) or "train_iters" in config["train"])
    return len(sections) >= (1 if own and precision is not None else 3) and (own or trains)


@megatron_bridge.reader
def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy fields of a YAML override: those of `mixed_precision`, else those of `model` and `ddp`."""
    found = lookup(config, _QUANT_RECIPE)
    modes = _fields_of_modes(config)
    modules = modules_of(found.get("config"), modes.get("fp8_recipe")) if isinstance(found, Mapping) else ()
    return modes | ({"fp8_modules": modules} if modules else {})


def _fields_of_modes(config: Mapping[str, Any]) -> dict[str, Any]:
    precision = config.get(_SECTION)
    if isinstance(precision, str):
        if precision.replace("-", "_") not in RECIPES:
            raise UnknownRecipe(precision, RECIPES)
        return get("megatron").read(
            {key: value for key, value in _named()[precision.replace("-", "_")].items() if value is not ABSENT}
        )
    if isinstance(precision, Mapping):
        return get("megatron").read(_plain(precision))
    model, ddp = config.get("model"), config.get("ddp")
    found = dict(model) if isinstance(model, Mapping) else {}
    found |= (
        {key: value for key, value in ddp.items() if key == "grad_reduce_in_fp32"} if isinstance(ddp, Mapping) else {}
    )
    return get("megatron").read(_plain(found))
