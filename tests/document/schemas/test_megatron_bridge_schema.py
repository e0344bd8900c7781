"""What the schema of Megatron Bridge 067f987 covers: its 14 recipes, and all fields of `MixedPrecisionConfig`."""

from __future__ import annotations

import pytest

import mpguard
from mpguard.document.schemas.megatron_bridge import FIELDS, FP8_RECIPES, KEYS, RECIPES, SECTIONS, VERSION
from mpguard.policy import FIELD_NAMES
from mpguard.targets.plugin import get


def test_the_recipes_are_those_of_mpguard_and_of_the_plugin() -> None:
    assert VERSION.startswith("067f987") and len(RECIPES) == 14 and set(RECIPES) <= set(mpguard.recipes())
    plugin = get("megatron-bridge")
    for name in RECIPES:
        written = plugin.settings(mpguard.recipe(name))["mixed_precision"].value
        assert written == name, "a recipe of Megatron Bridge is written by its name"


def test_the_fields_are_those_of_a_policy_and_of_the_target_megatron() -> None:
    assert set(FIELDS) - set(FIELD_NAMES) == {"fp32"}
    assert set(get("megatron").settings(mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed"))) <= FIELDS
    assert FIELDS <= KEYS and SECTIONS[0] == "mixed_precision"


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_scaling_recipes_are_those_of_transformer_engine(recipe: str) -> None:
    policy = mpguard.Policy(bf16=True, fp8="e4m3", fp8_recipe=recipe)
    assert "te" in policy.backends


@pytest.mark.parametrize("spelling", ["bf16_mixed", "bf16-mixed"])
def test_both_spellings_of_a_recipe_are_read(spelling: str) -> None:
    assert mpguard.Policy.of(get("megatron-bridge").read({"mixed_precision": spelling})) == mpguard.recipe("bf16_mixed")


def test_a_section_with_dtypes_for_hydra_is_read_back() -> None:
    policy = mpguard.recipe("bf16_mixed").replace(fp8="hybrid", fp8_dot_product_attention=True)
    made, _ = mpguard.inject({"train": {"train_iters": 1}}, policy, "megatron-bridge")
    section = made["mixed_precision"]
    assert section["params_dtype"] == {"_target_": "torch.bfloat16", "_call_": False}
    assert section["_target_"].endswith("MixedPrecisionConfig") and section["fp8_dot_product_attention"] is True
    assert mpguard.Policy.of(get("megatron-bridge").read(made)) == policy
