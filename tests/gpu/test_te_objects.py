"""Transformer Engine's real recipe objects. Run `pytest tests/gpu` where there is a GPU and the library."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import mpguard
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.targets.plugin import plugins

pytestmark = pytest.mark.gpu

te = pytest.importorskip("transformer_engine.pytorch")
recipes = pytest.importorskip("transformer_engine.common.recipe")


def built(policy: Policy) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpguard.NotCarried)
        return policy.to("te")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bf16_with_fp8_delayed_scaling_mixed", "DelayedScaling"),
        ("bf16_with_fp8_current_scaling_mixed", "Float8CurrentScaling"),
        ("bf16_with_fp8_subchannel_scaling_mixed", "Float8BlockScaling"),
        ("bf16_with_mxfp8_mixed", "MXFP8BlockScaling"),
        ("bf16_with_nvfp4_mixed", "NVFP4BlockScaling"),
    ],
)
def test_every_argument_is_a_field_of_the_recipe(name: str, kind: str) -> None:
    """Its recipes ignore unknown arguments: what is not a field would be dropped without a word."""
    policy = mpguard.recipe(name)
    recipe = built(policy)
    assert type(recipe) is getattr(recipes, kind)
    arguments = plugins()["te"].build_arguments(policy)
    del arguments["recipe"]
    for field, value in arguments.items():
        found = getattr(recipe, field)
        assert (found.name if field == "fp8_format" else found) == value, field


def test_delayed_scaling_has_the_policys_history() -> None:
    policy = Policy(
        bf16=True, fp8="e4m3", fp8_recipe="delayed", fp8_margin=1, fp8_amax_history_len=7, reduce_amax=False
    )
    recipe = built(policy)
    assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo, recipe.reduce_amax) == (
        1, 7, "most_recent", False,
    )  # fmt: skip
    assert recipe.fp8_format is recipes.Format.E4M3


def test_fast_accumulation_is_in_the_gradient_products() -> None:
    fast = built(Policy(bf16=True, fp8="hybrid", fp8_fast_accum=True))
    slow = built(Policy(bf16=True, fp8="hybrid"))
    for gemm in ("fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        assert getattr(fast, gemm).use_split_accumulator is False
        assert getattr(slow, gemm).use_split_accumulator is True


@pytest.mark.parametrize("name", ["delayed", "current", "subchannel", "mxfp8"])
def test_a_layer_trains_under_the_recipe(name: str) -> None:
    full = "bf16_with_mxfp8_mixed" if name == "mxfp8" else f"bf16_with_fp8_{name}_scaling_mixed"
    policy = mpguard.recipe(full)
    reason = hardware.detect().refuses(policy)
    layer = te.Linear(256, 256, params_dtype=torch.bfloat16)
    inputs = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with te.autocast(recipe=built(policy)):
            layer(inputs).float().pow(2).mean().backward()

    if reason is not None:
        with pytest.raises((AssertionError, RuntimeError)):  # what mpguard refuses, the library refuses
            step()
        return
    step()
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.abs().sum() > 0


class Probe(torch.nn.Module):
    """Notes the recipe that is in force where it stands."""

    recipe: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        self.recipe = FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None
        return inputs


def test_accelerate_hands_the_policy_on_to_transformer_engine() -> None:
    from accelerate import Accelerator

    policy = mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed").replace(fp8_margin=2, fp8_amax_history_len=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpguard.NotCarried)
        accelerator = Accelerator(**policy.to("accelerate"))
    probe = Probe()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), probe)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(32, 64, device="cuda"))
    assert probe.recipe == built(policy)
