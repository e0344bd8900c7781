"""transformers' `Conv1D` (GPT-2) in FP8: the matmuls of a Linear, with names, shapes and class as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the real library runs here")
transformers = pytest.importorskip("transformers", reason="the real library runs here")
pytest.importorskip("torchao", reason="the real library runs here")

from torch import nn
from transformers.pytorch_utils import Conv1D

import mpguard
from mpguard.nn.fp8 import filters
from mpguard.policy import hardware

POLICY = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True)
PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def gpt2(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=layers, n_head=2, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def loss_of(model: Any, number: int = 0) -> torch.Tensor:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(number))
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def test_gpt2_is_converted_and_its_checkpoint_is_that_of_the_plain_model() -> None:
    model, plain = gpt2(), gpt2()
    done = mpguard.convert(model, POLICY)
    assert sorted(done.converted) == sorted(f"transformer.h.{n}.{part}" for n in range(2) for part in PARTS)
    assert done.skipped == (("lm_head", "fp8_exclude"),) and done.others == ()
    assert {name: each.shape for name, each in model.state_dict().items()} == {
        name: each.shape for name, each in plain.state_dict().items()
    }
    assert model.lm_head.weight is model.transformer.wte.weight
    layer = model.transformer.h[0].mlp.c_fc
    assert isinstance(layer, Conv1D) and not isinstance(layer, nn.Linear), "what adapters ask"
    plain.load_state_dict(model.state_dict())
    losses = [loss_of(model), loss_of(plain)]
    assert losses[0] != losses[1] and torch.allclose(*losses, rtol=2e-2)
    mpguard.revert(model)
    assert type(layer) is Conv1D and torch.equal(loss_of(model), losses[1])
    assert not hasattr(layer, "config") and not hasattr(layer, "in_features")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_are_those_of_a_linear(recipe: str) -> None:
    policy = POLICY.replace(fp8_recipe=recipe, fp8="hybrid" if recipe == "tensorwise" else "e4m3")
    torch.manual_seed(0)
    conv, linear = Conv1D(48, 32), nn.Linear(32, 48)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias.normal_())
    x = torch.randn(2, 8, 32)
    results = []
    for layer in (conv, linear):
        model = nn.Sequential(layer)
        mpguard.convert(model, policy)
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(own)
        out.float().pow(2).sum().backward()
        results.append((out, own.grad, layer.weight.grad, layer.bias.grad))
    (out, grad_x, grad_w, grad_b), (other, other_x, other_w, other_b) = results
    assert torch.equal(out, other) and grad_w.shape == (32, 48)
    assert torch.allclose(grad_x, other_x, rtol=1e-2) and torch.allclose(grad_w, other_w.t(), rtol=1e-2, atol=1e-2)
    assert torch.equal(grad_b, other_b)


def test_training_follows_bf16() -> None:
    found = []
    for fp8 in (False, True):
        model = gpt2()
        if fp8:
            mpguard.convert(model, POLICY)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(12):
            loss = loss_of(model, number % 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    assert found[1] == pytest.approx(found[0], rel=0.02) and found[0] < 4.1


@pytest.mark.parametrize("first", ["convert", "adapt"])
def test_adapters_on_it_train_and_merge(first: str) -> None:
    peft = pytest.importorskip("peft")
    model: Any = gpt2(1)
    lora = peft.LoraConfig(target_modules=["c_attn", "c_fc"], r=4, fan_in_fan_out=True, lora_alpha=64)
    if first == "convert":
        mpguard.convert(model, POLICY)
        adapted = peft.get_peft_model(model, lora)
    else:
        adapted = peft.get_peft_model(model, lora)
        done = mpguard.convert(adapted, POLICY)
        assert {reason for name, reason in done.skipped if "lora_" in name} == {"LoRA adapter"}
    base = adapted.base_model.model.transformer.h[0].mlp.c_fc.base_layer
    before = copy.deepcopy(base.weight)
    optimizer = torch.optim.AdamW([own for own in adapted.parameters() if own.requires_grad], lr=1e-2)
    for _ in range(4):
        loss_of(adapted).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = loss_of(adapted)
    assert torch.equal(base.weight, before), "frozen"
    merged = adapted.merge_and_unload()
    assert not torch.equal(merged.transformer.h[0].mlp.c_fc.weight, before)
    assert torch.allclose(loss_of(merged), trained, rtol=2e-2), "merged into a transposed weight"


def test_with_another_library_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = list(gpt2(1).named_modules())
    policy = POLICY.replace(backend="te", fp8_emulate=False)
    reasons = set(filters.reasons(modules, policy).values())
    assert "is a Conv1D, whose transposed weight only torchao takes: set backend: torchao" in reasons
    both = hardware.Hardware("NVIDIA H200", (9, 0), 1, (13, 0), {"te": "2.20.2", "torchao": "0.18.0"})
    monkeypatch.setattr(hardware, "detect", lambda: both)
    assert "" in filters.reasons(modules, POLICY).values()
