"""The opt-ins on a GPU: the kernel for AdamW with masters, and `Conv1D` and the output head in FP8 products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mpguard
from mpguard.nn import master_weights
from mpguard.nn.master_weights import master_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 1000), nn.GELU(), nn.Linear(1000, 7)).cuda()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(number % 3)
    return (
        torch.randn(32, 96, device="cuda", generator=generator),
        torch.randn(32, 7, device="cuda", generator=generator),
    )


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        x, wanted = batch(number)
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x).float() - wanted).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fused", [True, None])
def test_the_kernel_is_torchs_adamw(fused: bool | None) -> None:
    plain, model = network(), network()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    assert master_weights.keep(optimizer) == 4
    assert train(model, optimizer, 30) == pytest.approx(train(plain, other, 30), rel=1e-3)
    assert master_weights._failed == []
    for own, exact in zip(model.parameters(), plain.parameters(), strict=True):
        master = master_of(own)
        assert master is not None and master.steps == 30, "the kernel ran"
        assert torch.equal(own, master.value.bfloat16()), "rounded to nearest"
        assert torch.allclose(master.value, exact, atol=3e-4)
        assert optimizer.state[own]["step"].item() == 30
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed = network()
    again = torch.optim.AdamW(resumed.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    master_weights.keep(again)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert train(model, optimizer, 5) == train(resumed, again, 5), "bit by bit"


def test_one_step_of_the_kernel_is_that_of_fp32_parameters() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    exact = nn.Parameter(torch.randn(5001, device="cuda", generator=generator))
    own = nn.Parameter(exact.detach().clone())
    other, optimizer = torch.optim.AdamW([exact], lr=1e-2, fused=True), torch.optim.AdamW([own], lr=1e-2, fused=True)
    master_weights.keep(optimizer)
    for _ in range(5):
        own.grad = torch.randn(5001, device="cuda", generator=generator).bfloat16()
        exact.grad = own.grad.float()
        other.step()
        optimizer.step()
        assert torch.allclose(master_of(own).value, exact, rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]
    with torch.no_grad():
        own.data[7] = 3.0
    own.grad = torch.zeros_like(own)
    before = master_of(own).value.clone()  # type: ignore[union-attr]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    after = master_of(own).value  # type: ignore[union-attr]
    assert after[7] == 3 and torch.equal(after[8:], before[8:]) and torch.equal(after[:7], before[:7])


def test_gpt2_and_its_head_run_in_fp8_products() -> None:
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    from torch.profiler import ProfilerActivity, profile

    policy = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_head=True, fp8_fast_accum=True)
    config = transformers.GPT2Config(
        vocab_size=1024, n_embd=256, n_layer=2, n_head=4, n_positions=128, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(0, 1024, (4, 128), device="cuda")
    losses = []
    for fp8 in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).cuda()
        if fp8:
            done = mpguard.convert(model, policy.replace(compile=False))
            assert len(done.converted) == 9, done
        with torch.autocast("cuda", torch.bfloat16), profile(activities=[ProfilerActivity.CPU]) as trace:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        losses.append(loss.item())
    products = {event.key: event.count for event in trace.key_averages() if event.key == "aten::_scaled_mm"}
    assert products == {"aten::_scaled_mm": 27}, "9 layers, forward and both gradients"
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
