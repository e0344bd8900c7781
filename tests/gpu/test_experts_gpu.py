"""Experts in FP8 on a GPU: torchao's matmul is the one in software, and all of their matmuls are kernels of FP8."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import mpguard
from mpguard.nn.fp8 import experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
pytest.importorskip("torchao")
transformers = pytest.importorskip("transformers", minversion="5")

POLICY = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_experts=True, compile=False)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(5, 0, 16, 1), (0, 0, 0, 1), (130, 257, 64, 0), (1000, 3, 0, 1500)])
def test_the_product_is_the_one_in_software(sizes: Any, transposed: bool, dtype: torch.dtype) -> None:
    """Also for empty groups, whose gradients are zeros, and rows behind the last group."""
    behind, inputs, outputs = 3, 256, 384
    generator = torch.Generator("cuda").manual_seed(0)
    rows = sum(sizes)
    x = torch.randn(rows + behind, inputs, device="cuda", generator=generator, dtype=torch.bfloat16)
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    stacked = torch.randn(len(sizes), *shape, device="cuda", generator=generator).to(dtype)
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device="cuda")
    weights = torch.randn(rows, outputs, device="cuda", generator=generator)
    found = []
    for emulated in (False, True):
        own, factor = x.clone().requires_grad_(), stacked.clone().requires_grad_()
        weight = factor if transposed else factor.transpose(-2, -1)
        out = experts._product(emulated)(own, weight, ends)
        (out[:rows].float() * weights).sum().backward()
        assert own.grad is not None and factor.grad is not None and factor.grad.dtype == dtype
        found.append((out[:rows], own.grad[:rows], factor.grad))
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(one).all() and difference(one, other) < 0.02
    empty = [number for number, size in enumerate(sizes) if not size]
    assert not found[0][2][empty].any(), "no tokens, no gradient"


def mixture(name: str, **changes: Any) -> Any:
    sizes = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "use_cache": False,
        "num_experts_per_tok": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).cuda()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("Mixtral", {"num_local_experts": 4}), ("Qwen3Moe", {"num_experts": 16}), ("GptOss", {"num_local_experts": 4})],
)
def test_mixtures_train_with_kernels_of_fp8(name: str, changes: Any, compiled: bool) -> None:
    if compiled and name == "GptOss":
        pytest.skip("compiling two is enough")
    from torch.profiler import ProfilerActivity, profile

    losses = []
    for fp8 in (False, True):
        model = mixture(name, **changes)
        if fp8:
            done = mpguard.convert(model, POLICY.replace(compile=compiled))
            assert [reason for _, reason in done.experts] == ["", ""], done
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for number in range(6):
            generator = torch.Generator("cuda").manual_seed(number % 2)
            ids = torch.randint(1, 512, (4, 64 - number % 2 * 4), device="cuda", generator=generator)
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    ran = {event.key: event.count for event in trace.key_averages() if "grouped_mm" in event.key}
    scaled = sum(count for key, count in ran.items() if key.startswith(("aten::_scaled_grouped_mm", "triton_tem")))
    assert scaled == 12, f"two matmuls of two layers, forward and both gradients: {ran}"
    assert not ran.get("aten::_grouped_mm"), ran


def test_an_input_on_the_cpu_is_refused() -> None:
    product = experts._product(False)
    with pytest.raises(mpguard.NotInForce, match="their input is on the CPU, which has no FP8 matmuls"):
        product(torch.randn(16, 32), torch.randn(1, 16, 32).transpose(-2, -1), torch.tensor([16], dtype=torch.int32))
