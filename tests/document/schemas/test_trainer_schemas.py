"""What the schemas of NeMo 1.23, LLaMA-Factory 0.9.5, axolotl 0.19.0 cover: every key that a plugin writes or reads."""

from __future__ import annotations

import itertools

import pytest
from policies import bases

import mpguard
from mpguard.core.errors import PolicyError
from mpguard.document.dialects import DIALECTS
from mpguard.document.schemas import axolotl, llamafactory, nemo
from mpguard.targets.plugin import get


@pytest.mark.parametrize("kind", ["axolotl", "llamafactory", "nemo"])
def test_a_key_that_the_plugin_writes_is_known(kind: str) -> None:
    dialect, written = DIALECTS[kind], 0
    for policy, strategy in itertools.product(bases(), (None, "fsdp2")):
        try:
            settings = get(kind).settings(policy, strategy)
        except PolicyError:
            continue
        for key in settings:
            *section, name = key.split(".")
            known = dialect.strict.get(section[0], dialect.keys) if section else dialect.keys
            assert name in known, key
            written += 1
    assert written > 10


def test_nemo_has_the_keys_of_its_documentation() -> None:
    """docs: "All following arguments are ignored if [transformer_engine] is not set to True"."""
    assert nemo.VERSION == "1.23" and set(nemo.FP8) <= nemo.KEYS and "transformer_engine" in nemo.KEYS
    assert nemo.SECTIONS == ("trainer", "model")


@pytest.mark.parametrize(("backend", "recipe"), [("auto", "rowwise"), ("torchao", "rowwise"), ("te", "delayed")])
def test_llamafactory_has_a_recipe_per_backend(backend: str, recipe: str) -> None:
    """llamafactory/train/fp8_utils.py, `create_fp8_kwargs`."""
    read = get("llamafactory").read({"bf16": True, "fp8": True, "fp8_backend": backend})
    policy = mpguard.Policy.of(read)
    assert policy.fp8_recipe == recipe and backend in llamafactory.FP8_BACKENDS
    assert policy.fp8_amax_history_len == (16 if backend == "te" else 1)


def test_a_backend_that_mpguard_does_not_read_is_refused() -> None:
    with pytest.raises(PolicyError, match="fp8_backend is msamp; mpguard reads auto, torchao and te"):
        get("llamafactory").read({"fp8": True, "fp8_backend": "msamp"})


@pytest.mark.parametrize("recipe", axolotl.FP8_RECIPES)
def test_axolotl_has_torchaos_recipes(recipe: str) -> None:
    """axolotl/utils/schemas/fp8.py: tensorwise, the default, rowwise and rowwise_with_gw_hp; other keys are refused."""
    read = get("axolotl").read({"bf16": True, "fp8": True, "fp8_config": {"recipe": recipe}})
    policy = mpguard.Policy.of(read)
    assert policy.fp8_recipe == recipe and "torchao" in policy.backends and {"recipe"} == axolotl.FP8_KEYS
    made, _ = mpguard.inject({"base_model": "m"}, policy, "axolotl")
    assert made.get("fp8_config", {"recipe": "tensorwise"}) == {"recipe": recipe} and made["torch_compile"] is True


@pytest.mark.filterwarnings("ignore::mpguard.NotCarried")
def test_axolotls_norms_are_name_patterns_of_the_policy() -> None:
    fsdp2 = {"base_model": "m", "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    policy = mpguard.Policy.of(get("axolotl").read({**fsdp2, "bf16": True, "fp32_norms": True}))
    assert policy.fp32_modules == ("*norm*",)
    made, _ = mpguard.inject(fsdp2, policy, "axolotl")
    assert made["fp32_norms"] is True
    with pytest.raises(PolicyError, match="requires FSDP2"):
        get("axolotl").settings(policy, "fsdp1")
    with pytest.raises(PolicyError, match="axolotl keeps norms in FP32"):
        get("axolotl").settings(policy.replace(fp32_modules=["*router*"]), "fsdp2")
