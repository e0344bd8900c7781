"""Megatron Bridge: the fields of its `MixedPrecisionConfig`, under its names.

    MixedPrecisionConfig(**policy.to("megatron"))

`fp8_modules` is no field of it, but `quant_recipe` of the model's config:

    model.quant_recipe = RecipeConfig.from_config_dict(quant_recipe(policy))

Written for `src/megatron/bridge/training/mixed_precision.py` at 067f987, and for Megatron Core's
`quantization/quant_config.py` and `TEQuantizationRecipe` in `extensions/transformer_engine.py`. Megatron-LM reads the
same from the YAML of `--te-precision-config-file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpguard import PolicyError
from mpguard.policy import BACKWARD_HIGH, NONE, Dtype, ModuleRecipe, Policy
from mpguard.targets import ABSENT, Setting, Settings, plugin

_DTYPES = ("params_dtype", "pipeline_dtype", "autocast_dtype")
_FP8 = (
    "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
    "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag",
)  # fmt: skip
_FP4 = ("fp4_recipe", "fp4_param_gather")
_LAYERS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_GATHERED = ("fp8_param_gather", "fp4_param_gather")
_PLAIN = ("bf16", "fp16", "autocast_enabled", "grad_reduce_in_fp32", "fp8", "fp4", *_FP8, *_FP4, *_LAYERS, *_SCALE)


@plugin(
    "megatron",
    carries=(
        *_DTYPES, *(name for name in _PLAIN if name != "fp4_recipe"),
        "fp8_param", "fp4_param", "backend", "fp8_emulate",
    ),
    library="torch",
    extra="accelerate",
)  # fmt: skip
def megatron(policy: Policy, _strategy: str | None) -> Settings:
    """Keyword arguments of Megatron Bridge's `MixedPrecisionConfig`.

    `fp8_param` and `fp4_param` are set through `fp8_param_gather` and `fp4_param_gather`: the constructor overwrites
    them with the defaults of these. Megatron keeps parameters so under every optimizer: "auto" is True.
    """
    recipe = policy.low_bit_recipe
    if recipe is not None and "te" not in policy.backends:
        raise PolicyError(
            f"megatron: the policy `{policy.name}` runs {recipe} on {' or '.join(policy.backends)}; Megatron has FP8 "
            "and FP4 through Transformer Engine: delayed, tensorwise, blockwise, mxfp8, nvfp4"
        )
    if high := next((each for each in policy.recipes if each.endswith(BACKWARD_HIGH)), None):
        raise PolicyError(
            f"megatron: the recipe {high} has its backward pass in high precision, for which Megatron has no setting. "
            f"Use {high.removesuffix(BACKWARD_HIGH)}"
        )
    dtypes = {
        "params_dtype": policy.params_dtype,
        "pipeline_dtype": policy.pipeline_dtype or policy.params_dtype,
        "autocast_dtype": policy.autocast_dtype,
    }
    return {
        "fp32": not policy.low_precision,
        **{name: _optional(dtype.short if dtype else None, dtype) for name, dtype in dtypes.items()},
        **{name: _optional(getattr(policy, name)) for name in _PLAIN if name not in _GATHERED},
        **{name: bool(getattr(policy, name)) for name in _GATHERED},
        "fp8_param": Setting(
            ABSENT, "fp8_param_gather sets it", equivalent=lambda found: found is bool(policy.fp8_param)
        ),
        "fp4_param": Setting(
            ABSENT, "fp4_param_gather sets it", equivalent=lambda found: found is bool(policy.fp4_param)
        ),
    }


def _optional(value: Any, dtype: Dtype | None = None) -> Setting:
    """Return the setting of a field: None is its default and may be absent; a dtype may have any spelling."""
    if value is None:
        return Setting(ABSENT, equivalent=lambda found: found is None)
    return Setting(value, equivalent=(lambda found: Dtype.spelled(str(found)) is dtype) if dtype else None)


@megatron.builder
def fields(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: Dtype.parse(value).torch if name in _DTYPES else value for name, value in arguments.items()}


@megatron.reader
def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy fields of a `MixedPrecisionConfig` as a mapping, without those that have no effect in it.

    Parameters in FP8 or FP4 are a wish ("auto"), as in a recipe: other engines cannot keep them under every optimizer.
    """
    found = {
        name: config[name] for name in ("bf16", "fp16", "autocast_enabled", "grad_reduce_in_fp32") if name in config
    }
    low = next((name for name in ("bf16", "fp16") if config.get(name)), "fp32")
    for name in _DTYPES:
        dtype = Dtype.parse(str(config[name])) if config.get(name) is not None else None
        follows = Dtype.parse(low) if name == "params_dtype" else found.get("params_dtype", Dtype.parse(low))
        if dtype is not None and (name == "autocast_dtype" or dtype is not follows):
            found[name] = dtype
    for kind, names in (("fp8", _FP8), ("fp4", _FP4)):
        if config.get(kind):
            found |= {name: config[name] for name in (kind, *names) if name in config}
            if config.get(f"{kind}_param") is not None:
                found.setdefault(f"{kind}_param_gather", config[f"{kind}_param"])
            if found.get(f"{kind}_param_gather") is True:
                found[f"{kind}_param_gather"] = "auto"
    if (config.get("fp8") or config.get("fp4")) and config.get("first_last_layers_bf16"):
        found |= {name: config[name] for name in _LAYERS if name in config}
    if config.get("fp8") and config.get("fp8_recipe", "tensorwise") != "delayed":
        for name in ("fp8_amax_history_len", "fp8_amax_compute_algo"):
            found.pop(name, None)
    if config.get("fp16"):
        scale = _SCALE[1:] if config.get("loss_scale") is None else _SCALE[:1]
        found |= {name: config[name] for name in scale if config.get(name) is not None}
    return found


#: The key by which Megatron Core knows what a config is, and its value.
_KIND = {"transformer_engine_config_type": "TEQuantizationParams"}

#: The `training_recipe` of layers that keep the recipe of the model.
_OF_MODEL = {"override_quantized_autocast": False}


def quant_recipe(policy: Policy) -> dict[str, Any]:
    """Return `fp8_modules` as Megatron Core's `RecipeConfig.from_config_dict` takes it.

    The first match decides there too. Patterns are compared with Megatron's own names
    (`decoder.layers.0.mlp.linear_fc1`). Blocks that are in BF16 for another reason (`first_last_layers_bf16`) stay so.
    Megatron refuses delayed scaling here: layers that have it keep the recipe of the model.
    """
    configs: dict[str, Any] = {}
    for each in policy.fp8_modules:
        recipe: dict[str, Any] = {}
        if each.recipe == "delayed":
            recipe = dict(_OF_MODEL)
        elif each.recipe != NONE:
            recipe = {"fp8_quantization_recipe": each.recipe, "fp8_format": policy.with_recipe(each.recipe).fp8}
        configs[each.recipe] = {**_KIND, "training_recipe": recipe}
    matchers = {
        f"mpguard_{number}": {"type": "glob", "enabled": True, "pattern": each.pattern, "config": each.recipe}
        for number, each in enumerate(policy.fp8_modules)
    }
    return {"configs": configs, "matchers": matchers}


def modules_of(found: Any, base: str | None) -> tuple[ModuleRecipe, ...]:
    """Return `fp8_modules` from a dict such as that of `quant_recipe`; empty for one that they cannot express.

    base: the FP8 recipe of the model, if it has one.
    """
    entries = []
    try:
        for matcher in found["matchers"].values():
            config = found["configs"][matcher["config"]]
            if matcher["type"] != "glob" or set(config) - {*_KIND, "training_recipe"}:
                return ()
            if matcher.get("enabled", False):
                own = config["training_recipe"]
                recipe = (base or NONE) if own == _OF_MODEL else own.get("fp8_quantization_recipe") or NONE
                entries.append(ModuleRecipe(matcher["pattern"], recipe))
    except (KeyError, TypeError, AttributeError):
        return ()
    return tuple(entries)
