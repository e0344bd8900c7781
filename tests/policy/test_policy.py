"""Policy: what can be, what cannot and why, and its text form."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from limits import seconds
from policies import CANDIDATES, TOGETHER

import mpguard
from mpguard.core.errors import PolicyError
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import BACKENDS, FIELD_NAMES, Policy

torch = pytest.importorskip("torch", reason="dtypes are compared with those of torch")

# --- Dtype ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", Dtype)
def test_every_dtype_is_torchs_and_its_spellings_are_read_back(dtype: Dtype) -> None:
    assert isinstance(dtype.torch, torch.dtype)
    assert Dtype.of(dtype.torch) is dtype
    for spelling in (dtype.torch_name, f"torch.{dtype.torch_name}", dtype.short, dtype.short.upper(), *dtype.value[3]):
        assert Dtype.parse(spelling) is dtype
    assert (str(dtype), repr(dtype)) == (dtype.short, f"Dtype.{dtype.name}")


def test_no_spelling_means_two_dtypes() -> None:
    spellings = [spelling for dtype in Dtype for spelling in (dtype.torch_name, dtype.short, *dtype.value[3])]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(("text", "near"), [("bf61", "bf16"), ("float61", "float16"), ("bfloat", "bfloat16")])
def test_an_unknown_dtype_names_the_near_ones(text: str, near: str) -> None:
    with pytest.raises(PolicyError, match=f"`{text}` is not a dtype; did you mean .*`{near}`"):
        Dtype.parse(text)
    assert Dtype.spelled(text) is None


def test_integers_are_no_dtype_of_ours() -> None:
    assert Dtype.of(torch.int64) is None


def test_the_bits_are_torchs() -> None:
    assert {d: d.bits for d in Dtype if d is not Dtype.FP4_E2M1} == {
        d: 8 * d.torch.itemsize for d in Dtype if d is not Dtype.FP4_E2M1
    }


# --- defaults and what follows --------------------------------------------------------------------


def test_defaults_are_fp32_throughout() -> None:
    policy = Policy()
    assert (policy.compute_dtype, policy.params_dtype, policy.master_dtype, policy.reduce_dtype) == (Dtype.FP32,) * 4
    assert policy.settings() == {}
    assert (policy.low_bit_recipe, policy.backends) == (None, ())


def test_params_dtype_follows_the_compute_dtype() -> None:
    assert Policy(bf16=True).params_dtype is Dtype.BF16
    assert Policy(fp16=True).params_dtype is Dtype.FP16
    assert Policy(bf16=True).replace(bf16=False, fp16=True).params_dtype is Dtype.FP16
    assert not Policy(bf16=True).explicit("params_dtype")
    assert Policy(bf16=True, params_dtype="fp32").replace(tf32=True).params_dtype is Dtype.FP32


def test_dtypes_are_read_in_any_spelling_and_from_torch() -> None:
    policies = [
        Policy(bf16=True, params_dtype=value) for value in ("float32", "torch.float32", torch.float32, Dtype.FP32)
    ]
    assert len(set(policies)) == 1


def test_the_reduction_is_in_fp32_or_in_the_parameters_dtype() -> None:
    assert Policy(bf16=True).reduce_dtype is Dtype.FP32
    assert Policy(bf16=True, grad_reduce_in_fp32=False).reduce_dtype is Dtype.BF16
    assert Policy(bf16=True, params_dtype="fp32", grad_reduce_in_fp32=False).reduce_dtype is Dtype.FP32


@pytest.mark.parametrize("twins", [("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather")])
def test_param_and_param_gather_are_one_setting(twins: tuple[str, str]) -> None:
    low: dict[str, Any] = {"fp8": "hybrid"} if "fp8" in twins[0] else {"fp4": "e2m1"}
    for one, other in (twins, twins[::-1]):
        policy = Policy(bf16=True, **low, **{one: True})
        assert getattr(policy, other) is True
        off = policy.replace(**{other: False})
        assert (getattr(off, one), getattr(off, other)) == (False, False)
        with pytest.raises(PolicyError, match="are one setting, and differ"):
            Policy(bf16=True, **low, **{one: True, other: False})


@pytest.mark.parametrize("recipe", BACKENDS)
def test_the_backends_of_a_recipe(recipe: str) -> None:
    low: dict[str, Any] = {"fp4": "e2m1"} if recipe == "nvfp4" else {"fp8": "e4m3", "fp8_recipe": recipe}
    policy = Policy(bf16=True, **low)
    assert policy.backends == BACKENDS[recipe]
    for backend in ("te", "torchao"):
        if backend in BACKENDS[recipe]:
            assert policy.replace(backend=backend).backends == (backend,)
        else:
            with pytest.raises(PolicyError, match=f"backend is {backend}, which has no {recipe} recipe"):
                policy.replace(backend=backend)


def test_emulation_is_torchaos() -> None:
    assert Policy(bf16=True, fp8="hybrid", fp8_emulate=True).backends == ("torchao",)
    for fields in ({"backend": "te"}, {"fp8_recipe": "delayed"}):
        with pytest.raises(PolicyError, match="only torchao emulates FP8"):
            Policy(bf16=True, fp8="hybrid", fp8_emulate=True, **fields)


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both True"),
        ({"bf16": True, "fp8": "hybrid", "fp4": "e2m1"}, "fp8 and fp4 are both set"),
        ({"fp8": "hybrid"}, "fp8 without bf16 or fp16"),
        ({"fp4": "e2m1"}, "fp4 without bf16 or fp16"),
        ({"bf16": True, "fp8": "e5m2"}, "pure E5M2 training is refused by Transformer Engine"),
        ({"bf16": True, "fp8": True}, 'name a format, such as "hybrid"'),
        ({"bf16": True, "fp8": "hybird"}, "did you mean 'hybrid'?"),
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwize"}, "did you mean 'tensorwise'?"),
        ({"bf16": "yes"}, "bf16 is 'yes'; it must be True or False"),
        ({"bf16": 1}, "bf16 is 1; it must be True or False"),
        ({"fp16": True, "hysteresis": 2.5}, "hysteresis is 2.5; it must be int"),
        ({"fp16": True, "hysteresis": True}, "hysteresis is True; it must be int"),
        ({"bf16": True, "params_dtype": "fp16"}, "params_dtype must be bf16 or fp32"),
        ({"params_dtype": "bf16"}, "FP32 compute has FP32 parameters"),
        ({"bf16": True, "params_dtype": "e4m3"}, "no arithmetic exists for float8 tensors"),
        ({"bf16": True, "params_dtype": "bf61"}, "`bf61` is not a dtype; did you mean `bf16`"),
        ({"bf16": True, "params_dtype": 16}, "params_dtype is 16; it must be None, a dtype"),
        ({"bf16": True, "master_dtype": "fp16"}, "the optimizer's parameters are fp32, or bf16"),
        ({"fp16": True, "master_dtype": "fp16"}, "Attempting to unscale FP16 gradients"),
        ({"master_weights": "optimizer"}, "it needs bf16"),
        ({"fp16": True, "master_weights": "optimizer"}, "GradScaler cannot unscale the gradients of FP16 parameters"),
        ({"bf16": True, "master_weights": "optimizer", "params_dtype": "fp32"}, "params_dtype is fp32"),
        ({"bf16": True, "master_weights": "optimizer", "master_dtype": "bf16"}, "master_dtype is bf16"),
        ({"bf16": True, "fp8": "hybrid", "master_weights": "optimizer", "fp8_param": True}, "masters of its own"),
        ({"bf16": True, "loss_scale": 128.0}, "only FP16's range needs loss scaling"),
        ({"fp16": True, "loss_scale": 128.0, "hysteresis": 3}, "has no effect with a fixed loss_scale=128"),
        ({"fp16": True, "loss_scale": 0}, "loss_scale is 0.0; it is a finite number above 0"),
        ({"fp16": True, "initial_loss_scale": float("inf")}, "it is a finite number above 0"),
        ({"fp16": True, "min_loss_scale": float("nan")}, "it is a finite number above 0"),
        ({"fp16": True, "min_loss_scale": 8, "initial_loss_scale": 4}, "8, above initial_loss_scale=4"),
        ({"bf16": True, "fp8_margin": 1}, "fp8_margin=1 has no effect here; it needs fp8 with fp8_recipe delayed"),
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 0}, "counts steps, from 1"),
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_margin": -1}, "it counts from 0"),
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_multi_head_attention": True},
         "Float8BlockScaling has none"),
        ({"bf16": True, "fp8": "hybrid", "first_last_layers_bf16": True}, "set how many blocks"),
        ({"bf16": True, "fp8": "hybrid", "num_layers_at_end_in_bf16": 2}, "it needs first_last_layers_bf16=True"),
        ({"bf16": True, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}, "it needs fp8 or fp4"),
        ({"bf16": True, "fp8": "hybrid", "reuse_grad_buf_for_mxfp8_param_ag": True}, "fp8_recipe mxfp8"),
        ({"bf16": True, "backend": "te"}, "backend=te has no effect here"),
        ({"bf16": True, "fuse": True}, "fuse=True has no effect here"),
        ({"bf16": True, "fp8": "hybrid", "fp8_exclude": "*lm_head"}, "fp8_exclude is '*lm_head'; it must be"),
        ({"compile": "yes"}, "compile is 'yes'; it must be"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PolicyError) as raised:
        Policy(**fields)
    assert reason in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_unknown_fields_name_the_near_ones() -> None:
    for make in (lambda: Policy.of({"params_dtyp": "bf16"}), lambda: Policy().replace(params_dtyp="bf16")):
        with pytest.raises(PolicyError, match=r"no field `params_dtyp`; did you mean `params_dtype`"):
            make()


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().bf16 = True


# --- names, equality, text ------------------------------------------------------------------------


def test_the_name_is_no_part_of_equality() -> None:
    one, other = Policy(bf16=True, name="one"), Policy(bf16=True, name="other")
    assert one == other and hash(one) == hash(other)
    assert one != Policy(fp16=True)


def test_replace_names_the_policy_and_its_changes() -> None:
    assert (
        mpguard.recipe("bf16_mixed").replace(grad_reduce_in_fp32=False).name
        == "bf16_mixed with grad_reduce_in_fp32=False"
    )
    assert mpguard.recipe("bf16_mixed").replace().name == "bf16_mixed"
    assert mpguard.recipe("bf16_mixed").replace(name="ours").name == "ours"


def policies() -> some.SearchStrategy[Policy]:
    """Valid policies: a recipe with up to four fields changed, one after the other, where that can be."""
    changes = some.sampled_from([(field, value) for field, values in CANDIDATES.items() for value in values])

    def changed(base: Policy, several: list[tuple[str, Any]]) -> Policy:
        for field, value in several:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", mpguard.NoEffectWarning)
                    base = base.replace(**{field: value}, **TOGETHER.get((field, value), {}))
            except PolicyError:
                continue
        return base

    return some.builds(
        changed,
        some.sampled_from([mpguard.recipe(name) for name in mpguard.recipes()]),
        some.lists(changes, max_size=4),
    )


@pytest.mark.filterwarnings("ignore::mpguard.NoEffectWarning")
@given(policies())
def test_the_text_form_parses_back(policy: Policy) -> None:
    read = Policy.parse(str(policy))
    assert read == policy and read.name == policy.name
    assert str(read) == str(policy)
    assert Policy.of(json.loads(json.dumps(policy.settings()))) == policy


@pytest.mark.filterwarnings("ignore::mpguard.NoEffectWarning")
@given(policies())
def test_settings_are_what_is_explicit(policy: Policy) -> None:
    assert set(policy.settings()) == {name for name in FIELD_NAMES if policy.explicit(name)}


@given(policies())
def test_replacing_nothing_changes_nothing(policy: Policy) -> None:
    assert policy.replace() == policy


@pytest.mark.parametrize(
    ("text", "reason"),
    [("bf16_mixed", "not a policy in text form"), ("[1]", "a JSON object is needed"),
     ('{"bf61": true}', "no field `bf61`"), ("", "not a policy in text form"),
     ('{"bf16": "on"}', "it must be True or False")],
)  # fmt: skip
def test_what_is_no_text_form_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        Policy.parse(text)


def test_policies_need_no_torch() -> None:
    code = "import sys; from mpguard.policy import Policy; Policy.parse('{}'); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=seconds(60)).returncode == 0


def test_a_change_takes_along_what_it_takes_the_effect_from() -> None:
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed")
    without = policy.replace(first_last_layers_bf16=False)
    assert (without.num_layers_at_start_in_bf16, without.num_layers_at_end_in_bf16) == (0, 0)
    assert policy.replace(fp8=None) == mpguard.recipe("bf16_mixed")
    assert mpguard.recipe("fp16_mixed").replace(fp16=False, bf16=True, grad_reduce_in_fp32=True) == Policy(bf16=True)


@pytest.mark.parametrize(
    ("recipe", "field", "value"),
    [
        ("tensorwise", "fp8_amax_history_len", 1024),
        ("tensorwise", "fp8_amax_compute_algo", "max"),
        ("blockwise", "fp8_margin", 1),
        ("rowwise", "reduce_amax", False),
        ("mxfp8", "fp8_amax_history_len", 16),
    ],
)
def test_a_field_of_delayed_scaling_with_another_recipe_is_a_warning(recipe: str, field: str, value: Any) -> None:
    """Megatron Bridge's guide sets them so; a value that changes nothing contradicts nothing."""
    with pytest.warns(mpguard.NoEffectWarning, match=f"{field}={value} has no effect here") as caught:
        policy = Policy(bf16=True, fp8="e4m3", fp8_recipe=recipe, **{field: value})
    assert caught[0].filename == __file__ and not policy.explicit(field)
    assert policy == Policy(bf16=True, fp8="e4m3", fp8_recipe=recipe)


def test_the_custom_example_of_megatron_bridge_is_a_policy() -> None:
    """docs/training/mixed-precision.md of Megatron Bridge, "Custom FP8 configuration"."""
    with pytest.warns(mpguard.NoEffectWarning):
        policy = Policy(
            bf16=True, params_dtype="bf16", pipeline_dtype="bf16", fp8="hybrid", fp8_recipe="tensorwise", fp8_margin=0,
            fp8_amax_history_len=1024, fp8_amax_compute_algo="max", fp8_param_gather=True,
        )  # fmt: skip
    assert policy.fp8_recipe == "tensorwise" and policy.fp8_param is True


def test_the_error_of_a_field_without_effect_names_it() -> None:
    with pytest.raises(mpguard.NoEffect) as caught:
        Policy(bf16=True, hysteresis=3)
    assert caught.value.field == "hysteresis"


def test_a_change_of_the_recipe_drops_the_fields_of_the_other() -> None:
    delayed = mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed")
    assert delayed.replace(fp8_recipe="tensorwise").fp8_amax_history_len == 1


def test_a_change_without_effect_is_still_refused() -> None:
    with pytest.raises(PolicyError, match="fp8_margin=3 has no effect"):
        mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(fp8=None, fp8_margin=3)


def test_a_policy_without_masters_has_script_requirements() -> None:
    requirements = mpguard.recipe("bf16_full").script_requirements
    assert requirements is not None and "model.to(torch.bfloat16)" in requirements
    assert mpguard.recipe("bf16_mixed").script_requirements is None
