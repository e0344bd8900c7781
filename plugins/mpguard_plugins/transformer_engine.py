"""Transformer Engine: the recipe object for `te.autocast(recipe=...)`.

Written for Transformer Engine 2.20. Its recipes are pydantic dataclasses that ignore unknown arguments, so only fields
that they have are passed: `fp8_wgrad` (formerly `override_linear_precision`) is not supported since 2.0.
"""

from __future__ import annotations

from typing import Any

from mpguard import PolicyError
from mpguard.policy import BACKWARD_HIGH, Policy
from mpguard.targets import Settings, plugin

#: fp8_recipe or fp4_recipe -> class in `transformer_engine.common.recipe`.
CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}

#: Recipes that Transformer Engine can compute the backward pass of in high precision, with `backward_override`.
_OVERRIDABLE = ("tensorwise", "blockwise", "mxfp8")


@plugin(
    "te",
    carries=(
        "fp8", "fp4", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "reduce_amax",
        "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_fast_accum", "backend", "fp8_emulate",
    ),
    extra="te",
    library="transformer_engine",
)  # fmt: skip
def te(policy: Policy, _strategy: str | None) -> Settings:
    """A recipe of `transformer_engine.common.recipe`.

    It determines how FP8 matmuls are scaled, not which modules run in FP8, nor the dtype of the rest.
    `fp8_fast_accum` exists only in Float8CurrentScaling: block scaling requires split accumulators. A recipe
    `*_with_bwd_hp` has `backward_override="high_precision"`.
    """
    if policy.low_bit_recipe is None:
        raise PolicyError(
            f"te: the policy `{policy.name}` has neither FP8 nor FP4; a recipe needs one. Set fp8 and fp8_recipe"
        )
    if "te" not in policy.backends:
        raise PolicyError(
            f"te: the policy `{policy.name}` runs {' and '.join(policy.recipes)} "
            f"on {' or '.join(policy.backends)}. Use target `torchao`, "
            "or a recipe of Transformer Engine: " + ", ".join(CLASSES)
        )
    recipe = policy.low_bit_recipe.removesuffix(BACKWARD_HIGH)
    settings: dict[str, Any] = {"recipe": CLASSES[recipe]}
    if recipe == "nvfp4":
        return settings
    assert policy.fp8
    settings["fp8_format"] = policy.fp8.upper()
    if recipe in ("delayed", "mxfp8"):
        settings["margin"] = policy.fp8_margin
    if recipe == "delayed":
        settings |= {
            "amax_history_len": policy.fp8_amax_history_len,
            "amax_compute_algo": policy.fp8_amax_compute_algo,
            "reduce_amax": policy.reduce_amax,
        }
    if recipe in _OVERRIDABLE:  # named in any case, because its default is NVTE_BACKWARD_OVERRIDE
        settings["backward_override"] = "high_precision" if recipe != policy.low_bit_recipe else None
    if recipe != "blockwise":
        settings |= {"fp8_dpa": policy.fp8_dot_product_attention, "fp8_mha": policy.fp8_multi_head_attention}
    if policy.fp8_fast_accum:
        if policy.low_bit_recipe != "tensorwise":
            raise PolicyError(
                f"te: fp8_fast_accum is True with fp8_recipe {recipe}; only tensorwise supports it. Set it to False"
            )
        settings |= {"fp8_gemm_dgrad.use_split_accumulator": False, "fp8_gemm_wgrad.use_split_accumulator": False}
    return settings


@te.builder
def recipe(arguments: dict[str, Any]) -> Any:
    from transformer_engine.common import recipe as recipes

    values = dict(arguments)
    kind = getattr(recipes, values.pop("recipe"))
    if "fp8_format" in values:
        values["fp8_format"] = recipes.Format[values["fp8_format"]]
    for gemm in ("fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        if gemm in values:
            values[gemm] = recipes.MMParams(**values[gemm])
    built = kind(**values)
    if (wanted := values.get("backward_override")) and getattr(built, "backward_override", None) != wanted:
        raise PolicyError(
            "te: the Transformer Engine that is installed has no backward pass in high precision (`backward_override` "
            "of its recipes), which 2.20 has. Install that, or take a recipe without `_with_bwd_hp`"
        )
    return built
