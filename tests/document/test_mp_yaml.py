"""mpguard's own keys in an accelerate config."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpguard
from mpguard.core.errors import ConfigError, UnknownRecipe
from mpguard.core.text_edits import apply_edits
from mpguard.document import mp_yaml, parse

REASON = "configs are read by accelerate itself"
load_config_from_file = pytest.importorskip(
    "accelerate.commands.config.config_args", reason=REASON
).load_config_from_file

BASE = "distributed_type: 'NO'\nmixed_precision: bf16\nfp8_config:\n  mpguard_recipe: bf16_mixed\n"


def load(folder: Path, text: str) -> mpguard.Policy:
    path = folder / "mp.yaml"
    path.write_text(text)
    return mp_yaml.load_policy(path)


def test_the_recipe_is_read(tmp_path: Path) -> None:
    policy = load(tmp_path, BASE)
    assert policy == mpguard.recipe("bf16_mixed") and policy.name == "bf16_mixed"


def test_overrides_change_fields_and_the_name(tmp_path: Path) -> None:
    policy = load(tmp_path, BASE + "  mpguard_overrides: {grad_reduce_in_fp32: false, compile: true}\n")
    assert policy.grad_reduce_in_fp32 is False and policy.compile is True
    assert policy.name == "bf16_mixed with grad_reduce_in_fp32=False, compile=True"


def test_deviations_that_are_wanted_are_read_and_kept_by_accelerate(tmp_path: Path) -> None:
    text = BASE + "  mpguard_allow: [local_sgd, {frozen: fp16}, 'fp32: *lm_head']\n"
    load(tmp_path, text)
    assert list(map(str, mp_yaml.stored(parse(text, "mp.yaml")).allow)) == [
        "local_sgd",
        "frozen: fp16",
        "fp32: *lm_head",
    ]
    assert "mpguard_allow" in load_config_from_file(str(tmp_path / "mp.yaml")).fp8_config
    assert apply_edits(text, parse(text, "mp.yaml").edits(mp_yaml.changes(parse(text, "x").data, "bf16_mixed"))) == text


FP8 = BASE.replace("bf16_mixed", "hopper_bf16_with_fp8_mixed")
MODULES = [{"pattern": "*.mlp.*", "recipe": "rowwise"}, {"pattern": "model.layers.0.*", "recipe": "none"}]


def test_a_recipe_per_module_is_written_read_back_and_kept_by_accelerate(tmp_path: Path) -> None:
    document = parse(FP8, "mp.yaml")
    fields = {"tf32": True, "fp8_modules": MODULES}
    text = apply_edits(FP8, document.edits(mp_yaml.changes(document.data, "hopper_bf16_with_fp8_mixed", fields)))
    policy = load(tmp_path, text)
    assert policy == mpguard.recipe("hopper_bf16_with_fp8_mixed").replace(**fields)
    assert policy.name.endswith(" with tf32=True, fp8_modules=[*.mlp.* rowwise, model.layers.0.* none]")
    assert load_config_from_file(str(tmp_path / "mp.yaml")).fp8_config["mpguard_fp8_modules"] == MODULES
    stored = mp_yaml.stored(parse(text, "mp.yaml"))
    assert stored.fields == fields and stored.overrides == {"tf32": True}
    other = parse(text, "mp.yaml")
    assert apply_edits(text, other.edits(mp_yaml.changes(other.data, "bf16_mixed"))) == BASE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FP8 + "  mpguard_fp8_modules: [{pattern: a, recipe: off}]\n", r"mp\.yaml:5: .*boolean\); write `none`"),
        (FP8 + "  mpguard_fp8_modules:\n  - {pattern: a, recipe: delayed}\n", r"mp\.yaml:5: .*modules`: .*delayed"),
        (BASE + "  mpguard_fp8_modules: [{pattern: a, recipe: none}]\n", r"mp\.yaml:5: .*_modules`: .*it needs fp8"),
        ("fp8_config:\n  mpguard_fp8_modules: [{pattern: a, recipe: none}]\n", r"mp\.yaml:2: .*`mpguard_recipe` is"),
        (FP8 + "  mpguard_overrides: {fp8_modules: []}\n", r"mp\.yaml:5: .*as `fp8_config.mpguard_fp8_modules`"),
        (FP8 + "  mpguard_fp8_module: []\n", r"mp\.yaml:5: .*no such key; did you mean `mpguard_fp8_modules`"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_recipe_per_module_has_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_json_configs_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.json"
    path.write_text('{"distributed_type": "NO", "fp8_config": {"mpguard_recipe": "bf16-mixed"}}')
    assert mp_yaml.load_policy(path) == mpguard.recipe("bf16_mixed")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (BASE.replace("mixed\n", "mxied\n"), UnknownRecipe, r"mp\.yaml:4: `fp8_config.mpguard_recipe`: .*`bf16_mixed`"),
        (BASE.replace("recipe", "recpe"), ConfigError, r"mp\.yaml:4: `fp8_config.mpguard_recpe`: .*`mpguard_recipe`"),
        (BASE + "  mpguard_overrides:\n    tf23: true\n", ConfigError, r"mp\.yaml:6: .*no field `tf23`; .*`tf32`"),
        (BASE + "  mpguard_overrides: {fp16: true}\n", ConfigError, r"mp\.yaml:5: .*bf16 and fp16 are both True"),
        (BASE + "  mpguard_overrides: {tf32: maybe}\n", ConfigError, r"mp\.yaml:5: .*tf32 is 'maybe'"),
        (BASE + "  mpguard_overrides: {tf32: {a: 1}}\n", ConfigError, r"mp\.yaml:5: .*is a section"),
        (BASE + "  mpguard_overrides: tf32\n", ConfigError, r"mp\.yaml:5: .*a section is needed"),
        (BASE.replace("bf16_mixed", "no"), ConfigError, r"mp\.yaml:4: .*is false; the name of a recipe"),
        ("fp8_config: TE\n", ConfigError, r"mp\.yaml:1: `fp8_config`: is TE; a section is needed"),
        ("fp8_config:\n  mpguard_overrides: {tf32: true}\n", ConfigError, r"mp\.yaml:2: .*overrides no recipe"),
        (BASE + "  mpguard_recipe: fp32\n", ConfigError, r"mp\.yaml:5: `mpguard_recipe` is a duplicate key"),
        ("a: !!python/name:os.system\n", ConfigError, r"mp\.yaml:1: the tag .* is never executed"),
        ("mixed_precision: bf16\n", ConfigError, r"mp\.yaml: names no recipe. Run `mpguard apply RECIPE "),
        (BASE + "  mpguard_allow: [local_sdg]\n", ConfigError, r"mp\.yaml:5: .*mpguard_allow`: .*`local_sgd`"),
        ("", ConfigError, r"mp\.yaml: is empty"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_file_line_and_key(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(tmp_path, text)


def test_the_project_settings_are_the_fallback(tmp_path: Path) -> None:
    (tmp_path / "mpguard.toml").write_text('recipe = "fp32"\n')
    assert load(tmp_path, "mixed_precision: 'no'\n") == mpguard.recipe("fp32")
    assert load(tmp_path, BASE) == mpguard.recipe("bf16_mixed")


def test_an_unknown_recipe_in_the_project_settings_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "mpguard.toml").write_text('recipe = "fp23"\n')
    with pytest.raises(UnknownRecipe, match=r"mpguard\.toml: `recipe`: .*did you mean `fp32`"):
        load(tmp_path, "mixed_precision: 'no'\n")


def test_what_is_written_is_read_back_and_accepted_by_accelerate(tmp_path: Path) -> None:
    text = "distributed_type: 'NO'\nmixed_precision: bf16\n"
    document = parse(text, "mp.yaml")
    changes = mp_yaml.changes(document.data, "bf16_mixed", {"tf32": True, "num_layers_at_start_in_bf16": 0})
    after = apply_edits(text, document.edits(changes))
    policy = load(tmp_path, after)
    assert policy == mpguard.recipe("bf16_mixed").replace(tf32=True)
    assert (
        mp_yaml.changes(parse(after, "mp.yaml").data, "bf16_mixed", {"tf32": True, "num_layers_at_start_in_bf16": 0})
        == []
    )
    accelerate = load_config_from_file(str(tmp_path / "mp.yaml"))
    assert accelerate.mixed_precision == "bf16" and accelerate.fp8_config["mpguard_recipe"] == "bf16_mixed"


def test_another_recipe_removes_the_overrides_of_the_first() -> None:
    text = BASE + "  mpguard_overrides: {tf32: true}\n"
    document = parse(text, "mp.yaml")
    after = apply_edits(text, document.edits(mp_yaml.changes(document.data, "fp32")))
    assert after == BASE.replace("bf16_mixed", "fp32")


def test_a_sagemaker_config_has_no_place_for_a_recipe() -> None:
    with pytest.raises(ConfigError, match="SageMaker"):
        mp_yaml.changes({"compute_environment": "AMAZON_SAGEMAKER"}, "bf16_mixed")
