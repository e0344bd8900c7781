"""A recipe per module, and torchao's block-wise layer, on a GPU: `pytest tests/gpu` on a Hopper machine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from te_models import fp8_share, model, train
from torch import nn

import mpguard
from mpguard.policy.policy import Policy
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof import fp8
from mpguard.runtime.proof.checks import compare
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.verdict import Row, Verdict

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::mpguard.MpguardWarning")]

FIRST = {"pattern": "layers.0.*", "recipe": "none"}


def row(net: nn.Module, policy: Policy, te_recipes: list[dict[str, Any]]) -> Row:
    seen = Observed(fp8=fp8.find_fp8_layers(list(net.named_modules()), policy, te_recipes))
    return next(each for each in compare(seen, Plan(policy)) if each.name == "fp8 recipe")


def policy_of(backend: str, **recipes: str) -> Policy:
    entries = [FIRST, *({"pattern": f"*.{name}", "recipe": recipe} for name, recipe in recipes.items())]
    return Policy(bf16=True, fp8="hybrid", backend=backend, fp8_modules=entries, compile=False)  # type: ignore[arg-type]


def test_layers_of_transformer_engine_run_each_in_its_recipe() -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.common.recipe import DelayedScaling

    net, policy = model(), policy_of("te", up="blockwise", down="tensorwise_with_bwd_hp")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    done = mpguard.convert(net, policy)
    assert len(done.converted) == 6 and "3 blockwise, 3 tensorwise_with_bwd_hp" in str(done)
    losses = train(net, optimizer, 30)
    assert losses[-1] < 0.8 * losses[0]
    found = row(net, policy, [])
    assert found.verdict is Verdict.AS_ASKED, found
    assert found.found == "blockwise 3, tensorwise_with_bwd_hp 3, none 2", found
    with te.autocast(recipe=DelayedScaling()), torch.autocast("cuda", torch.bfloat16):
        net(torch.randint(0, 128, (4, 32), device="cuda")).float().sum().backward()
    assert row(net, policy, []).verdict is Verdict.AS_ASKED, "an autocast around the model does not replace its recipes"


def test_a_backward_pass_in_high_precision_has_the_gradients_of_bf16_products() -> None:
    """With the output's gradient given, dX = dY @ W and dW = dY.T @ X are those of BF16 up to its rounding."""
    pytest.importorskip("transformer_engine.pytorch")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 256, bias=False)).cuda()
    x, dy = torch.randn(128, 256, device="cuda"), torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    errors = {}
    exact = [dy.double() @ plain[0].weight.double(), dy.double().T @ x.double()]
    for recipe in ("tensorwise", "tensorwise_with_bwd_hp"):
        net = copy.deepcopy(plain)
        mpguard.convert(net, Policy(bf16=True, fp8="hybrid", fp8_recipe=recipe, backend="te", compile=False))
        inputs = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            output = net(inputs)
        output.backward(dy)
        found = [inputs.grad, net[0].weight.grad]
        errors[recipe] = [
            float((each.double() - other).norm() / other.norm()) for each, other in zip(found, exact, strict=True)
        ]
    assert max(errors["tensorwise_with_bwd_hp"]) < 0.01 < min(errors["tensorwise"]), errors


def test_torchao_trains_block_wise_with_a_bias_and_with_odd_rows() -> None:
    pytest.importorskip("torchao")
    policy = Policy(bf16=True, fp8="e4m3", fp8_recipe="blockwise", backend="torchao", compile=False)
    plain, net = model(), model()
    reference = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), 30)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    assert len(mpguard.convert(net, policy).converted) == 8
    losses = train(net, optimizer, 30)
    assert abs(losses[-1] - reference[-1]) < 0.1 * reference[0], (losses, reference)
    assert fp8_share(net, optimizer)[0] >= 24
    assert train(net, optimizer, 2, rows=61)[-1] < losses[0]


def test_the_products_of_torchao_are_block_wise() -> None:
    """One large value spoils the scale of its block of 128, and not that of the others, forward and backward."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    errors = {}
    for recipe in ("tensorwise", "blockwise"):
        net = nn.Sequential(nn.Linear(256, 128, bias=False)).cuda()
        weight = net[0].weight.detach().double()
        fields = {"fp8": "e4m3", "fp8_recipe": recipe, "backend": "torchao", "compile": False}
        mpguard.convert(net, Policy(bf16=True, **fields))  # type: ignore[arg-type]
        x = torch.randn(128, 256, device="cuda") * 1e-6
        x[0, 0] = 1.0
        with torch.autocast("cuda", torch.bfloat16):
            found = net(x)
        exact = x.double() @ weight.T
        errors[recipe] = float((found[1:].double() - exact[1:]).norm() / exact[1:].norm())
    assert errors["blockwise"] < 0.05 < errors["tensorwise"], errors


def test_torchao_mixes_block_wise_and_other_recipes() -> None:
    pytest.importorskip("torchao")
    net, policy = model(), policy_of("torchao", up="blockwise", down="rowwise")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    mpguard.convert(net, policy)
    losses = train(net, optimizer, 30)
    assert losses[-1] < 0.8 * losses[0]
    found = row(net, policy, [])
    assert found.verdict is Verdict.AS_ASKED and found.found == "blockwise 3, rowwise 3, none 2", found
