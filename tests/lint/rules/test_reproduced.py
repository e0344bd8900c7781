"""The failures that rules name, where neither public code nor docs/findings.md shows them: each as a small program.

MPG102, MPG417, MPG506, MPG529, MPG603, MPG617 and MPG618 are on by default because of these.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the failures are those of real tensors")

import torch
from torch import nn


def test_targets_that_are_cast_by_hand_are_other_ones() -> None:
    """MPG102: autocast computes this loss in FP32, from boxes that the cast has moved by up to four pixels."""
    boxes = torch.rand(1_000, 4, generator=torch.Generator().manual_seed(0)) * 1_333
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact, rounded = (nn.functional.smooth_l1_loss(boxes, each) for each in (boxes, boxes.bfloat16()))
    assert exact.dtype == rounded.dtype == torch.float32
    assert float(exact) == 0 and float(rounded) > 0.4


def test_a_model_that_is_evaluated_in_fp16_overflows(tmp_path: Path) -> None:
    """MPG506: what is trained in BF16 is cast to FP16 as a whole, in which 90,000 is infinite, and stays so."""
    transformers = pytest.importorskip("transformers", reason="the real Trainer evaluates")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([300.0]))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.scale * x.to(self.scale.dtype)).float().mean()}

    def evaluated(mode: str) -> tuple[float, torch.dtype]:
        model, data = Net(), [{"x": torch.tensor([300.0]), "labels": torch.tensor(0)}]
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], bf16=True, **{mode: True})
        found = transformers.Trainer(model, arguments, eval_dataset=data).evaluate()
        return found["eval_loss"], model.scale.dtype

    loss, dtype = evaluated("bf16_full_eval")
    assert loss == pytest.approx(90_000, rel=0.01) and dtype == torch.bfloat16
    assert evaluated("fp16_full_eval") == (float("inf"), torch.float16)


def test_an_optimizer_that_is_built_before_float8_weights_trains_none_of_them() -> None:
    """MPG417: with float8 all-gather the conversion replaces each weight, and the optimizer keeps the old one."""
    float8 = pytest.importorskip("torchao.float8", reason="the real conversion runs here")
    config = float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)

    def changed(*, before: bool) -> set[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        early = torch.optim.SGD(model.parameters(), lr=1.0)
        float8.convert_to_float8_training(model, config=config)
        optimizer = early if before else torch.optim.SGD(model.parameters(), lr=1.0)
        optimized = {id(each) for group in optimizer.param_groups for each in group["params"]}
        return {name for name, each in model.named_parameters() if id(each) in optimized}

    assert changed(before=False) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert changed(before=True) == {"0.bias", "1.bias"}


def test_unlikely_words_get_no_gradient_in_half() -> None:
    """MPG603: in FP16 those of unlikely words are zero, and so are the gradients through them."""
    logits = torch.linspace(-10, 10, 50_000)

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        given = logits.to(dtype).detach().requires_grad_()
        (-torch.log_softmax(given, -1)[-1]).backward()
        assert given.grad is not None
        return given.grad

    assert bool((gradient(torch.float32) != 0).all())
    assert float((gradient(torch.float16) == 0).float().mean()) > 0.4


def test_rounded_probabilities_choose_other_experts() -> None:
    """MPG617: rounding to BF16 makes ties of close probabilities, and `topk` breaks them by position."""
    scores = torch.randn(4_096, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    probabilities = torch.softmax(scores, -1)
    chosen = probabilities.topk(2).indices.sort().values
    rounded = probabilities.bfloat16().topk(2).indices.sort().values
    assert float((chosen != rounded).any(-1).float().mean()) > 0.1


def test_a_model_that_the_accelerator_has_not_prepared_computes_in_fp32() -> None:
    """MPG529: only the forward of prepared models runs under autocast."""
    accelerate = pytest.importorskip("accelerate", reason="the real Accelerator prepares the model")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    seen = []

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(super().forward(x).dtype)
            return x

    frozen, trained = Net(8, 8).requires_grad_(False), accelerator.prepare(Net(8, 8))
    frozen(trained(torch.randn(2, 8)))
    with accelerator.autocast():
        frozen(torch.randn(2, 8))
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_rounded_times_are_few_and_other_ones() -> None:
    """MPG618: BF16 leaves 128 times of [0.5, 1), and makes others of half the integers that a scheduler draws."""
    drawn = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.5
    assert drawn.unique().numel() > 90_000
    assert drawn.bfloat16().unique().numel() <= 129
    steps = torch.arange(1_000)
    assert float((steps.bfloat16().long() != steps).float().mean()) > 0.4


def test_fsdp_casts_buffers_of_frequencies() -> None:
    """MPG512: the buffer is BF16 in the forward pass, and at position 4096 angles are wrong by more than one."""
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    exact = 1.0 / 10_000 ** (torch.arange(0, 64, 2).float() / 64)

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("inv_freq", exact.clone(), persistent=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.inv_freq.float()  # type: ignore[operator, union-attr]

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = FullyShardedDataParallel(Rotary(), mixed_precision=policy, device_id=torch.device("cpu"))
        _, used = model(torch.ones(2, 4))
    finally:
        distributed.destroy_process_group()
    assert float((4096 * (used - exact)).abs().max()) > 1
