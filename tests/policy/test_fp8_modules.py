"""`fp8_modules`: a recipe per module."""

from __future__ import annotations

from typing import Any

import pytest

from mpguard.core.errors import NoEffect, PolicyError
from mpguard.policy import Policy
from mpguard.policy.fp8_modules import ModuleRecipe, entry_for, module_recipes
from mpguard.policy.recipes import recipe

MLP, ATTENTION, FIRST = (
    {"pattern": "*.mlp.*", "recipe": "rowwise"},
    {"pattern": "*.attn.*", "recipe": "tensorwise"},
    {"pattern": "model.layers.0.*", "recipe": "none"},
)


def fp8(*modules: Any, **fields: Any) -> Policy:
    return Policy(**{"bf16": True, "fp8": "hybrid", "fp8_modules": modules, **fields})


def test_the_entries_survive_the_text_form_and_a_replace() -> None:
    policy = fp8(MLP, ATTENTION, FIRST)
    assert policy.fp8_modules[0] == ModuleRecipe("*.mlp.*", "rowwise")
    assert policy.settings()["fp8_modules"] == [MLP, ATTENTION, FIRST]
    assert Policy.parse(str(policy)) == policy and hash(Policy.parse(str(policy))) == hash(policy)
    assert policy.replace(tf32=True).fp8_modules == policy.fp8_modules
    assert policy.replace(fp8=None).fp8_modules == (), "without FP8 it has no effect"
    assert recipe("hopper_bf16_with_fp8_mixed").replace(fp8_modules=[MLP]).name.endswith("[*.mlp.* rowwise]")


def test_a_name_has_few_patterns_and_a_field_all() -> None:
    """Ranks compare the text of a field, so that it must not be shortened."""
    many = [{"pattern": f"layers.{number}.*", "recipe": "none"} for number in range(9)]
    policy = recipe("hopper_bf16_with_fp8_mixed").replace(fp8_modules=many)
    assert policy.name.endswith("with fp8_modules=[9 patterns]")
    assert policy.format_field("fp8_modules").count("none") == 9


def test_the_first_match_decides_for_all_names_of_a_layer() -> None:
    entries = module_recipes([{"pattern": "*.0.*", "recipe": "none"}, MLP])
    assert entry_for(["layers.0.mlp.up"], entries) == entries[0]
    assert entry_for(["layers.1.mlp.up"], entries) == entries[1]
    assert entry_for(["layers.1.mlp.up", "layers.0.mlp.up"], entries) == entries[0], "a module that is shared"
    assert entry_for(["head"], entries) is None


def test_the_layers_of_a_recipe_have_a_policy_of_their_own() -> None:
    policy = fp8(MLP, FIRST)
    assert policy.recipes == ("tensorwise", "rowwise") and policy.backends == ("torchao",)
    rowwise, base = policy.with_recipe("rowwise"), policy.with_recipe("tensorwise")
    assert (rowwise.fp8_recipe, rowwise.fp8, rowwise.fp8_modules) == ("rowwise", "e4m3", ())
    assert (base.fp8_recipe, base.fp8, base.fp8_modules) == ("tensorwise", "hybrid", ())
    assert fp8(FIRST, backend="te").backends == ("te",)
    assert recipe("bf16_with_fp8_delayed_scaling_mixed").replace(fp8_modules=[FIRST]).recipes == ("delayed",)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("*.mlp.*", r"fp8_modules is '\*\.mlp\.\*'; a list is needed"),
        ({"*.mlp.*": "rowwise"}, r"a list is needed, such as \[\{pattern"),
        ([["*.mlp.*", "rowwise"]], r"fp8_modules\[0\] is \['\*.mlp.\*', 'rowwise'\]; a pattern and a recipe"),
        ([MLP, {"patern": "a", "recipe": "none"}], r"fp8_modules\[1\]: has the key `patern`; did you mean `pattern`"),
        ([{"pattern": "", "recipe": "none"}], r"fp8_modules\[0\]: pattern is ''"),
        ([{"pattern": "a", "recipe": False}], r"`off` and `no` as a boolean\); write `none`"),
        ([{"pattern": "a"}], r"the recipe None \(it names no recipe\); write `none`"),
        ([{"pattern": "a", "recipe": "rowise"}], r"'rowise', which is no recipe of FP8; did you mean `rowwise`"),
        ([{"pattern": "a", "recipe": "off"}], r"'off', which is no recipe of FP8; known are .*none"),
        ([{"pattern": "a", "recipe": ["rowwise"]}], r"\['rowwise'\], which is no recipe of FP8; known are none"),
        ([MLP, {**MLP, "recipe": "none"}], r"fp8_modules\[1\]: `\*.mlp.\*` is there already, with recipe rowwise"),
    ],
)
def test_a_mistake_in_an_entry_names_the_entry_and_the_remedy(modules: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy(bf16=True, fp8="hybrid", fp8_modules=modules)


@pytest.mark.parametrize(
    ("fields", "modules", "message"),
    [
        ({"backend": "te"}, [MLP], r"`\*.mlp.\*` has the recipe rowwise: backend is te, which has no rowwise"),
        ({}, [{"pattern": "a", "recipe": "delayed"}], r"recipes are tensorwise, delayed; .* next to `none` only"),
        ({"fp8_recipe": "delayed"}, [MLP], r"recipes are delayed, rowwise"),
        ({"fp8_recipe": "delayed"}, [{"pattern": "a", "recipe": "mxfp8"}], r"recipes are delayed, mxfp8"),
    ],
)
def test_recipes_that_cannot_be_in_one_model_are_refused(
    fields: dict[str, Any], modules: list[Any], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        fp8(*modules, **fields)


def test_it_needs_fp8() -> None:
    with pytest.raises(NoEffect, match=r"fp8_modules=\[\*.mlp.\* rowwise\] has no effect here; it needs fp8"):
        Policy(bf16=True, fp8_modules=(ModuleRecipe("*.mlp.*", "rowwise"),))
