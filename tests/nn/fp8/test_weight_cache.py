"""`fp8_weight_cache`: which forward passes round a weight, and what the proof says about its copies.

The copies themselves are Transformer Engine's: tests/gpu/test_opt_ins_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn

import mpguard
from mpguard.core.errors import PolicyError
from mpguard.nn.fp8 import weight_cache
from mpguard.nn.fp8.padding import Padding, PaddingState
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.runtime.plan import Plan
from mpguard.runtime.proof.checks import compare
from mpguard.runtime.proof.fp8 import Fp8Layers, find_fp8_layers
from mpguard.runtime.proof.observe import Observed
from mpguard.runtime.proof.recorder import Recorder
from mpguard.runtime.proof.verdict import Row, Verdict
from mpguard.targets.capabilities import SHARDED_WEIGHTS, require_supported

POLICY = mpguard.Policy(bf16=True, fp8="hybrid", fp8_weight_cache=True)


class Layer(nn.Linear):
    """As Transformer Engine's layer: it asks if the pass is the first one, and keeps a copy unless it is told None."""

    __module__ = "transformer_engine.stand_in"

    def __init__(self) -> None:
        super().__init__(16, 16)
        weight_cache.count_steps()
        self.__dict__["_mpguard_fp8"] = PaddingState("layer", POLICY, Padding(16))
        self.first: list[bool | None] = []

    @property
    def keeps_copy(self) -> bool:
        return any(each is not None for each in self.first)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.first.append(weight_cache.is_first_pass(self))
        return super().forward(input)


def run(layer: nn.Module) -> None:
    layer(torch.ones(2, 16)).sum().backward()


def step(layer: nn.Module, **options: Any) -> None:
    torch.optim.AdamW(layer.parameters(), lr=0.1, **options).step()


def in_place(layer: Layer) -> None:
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)


def average(layer: Layer) -> None:
    """A change that torch does not count, next to a step, as averages of weights and clipping are."""
    step(layer, fused=True)
    layer.weight.data.mul_(0.5)


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "AdamW": step,
    "AdamW(fused=True)": lambda layer: step(layer, fused=True),
    "AdamW(foreach=True)": lambda layer: step(layer, foreach=True),
    "load_state_dict": lambda layer: layer.load_state_dict(layer.state_dict()),
    "load_state_dict(assign=True)": lambda layer: layer.load_state_dict(
        {name: value.clone() for name, value in layer.state_dict().items()}, assign=True
    ),
    "in place": in_place,
    "data = tensor": lambda layer: setattr(layer.weight, "data", torch.ones(16, 16)),
    "average": average,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_is_rounded_once_until_it_changes(change: str) -> None:
    layer = Layer()
    for _ in range(3):
        run(layer)
    CHANGES[change](layer)
    for _ in range(2):
        run(layer)
    assert layer.first == [True, False, False, True, False]


def test_a_skipped_step_changes_nothing() -> None:
    layer = Layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run(layer)
    assert layer.weight.grad is not None
    layer.weight.grad[0, 0] = float("inf")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    run(layer)
    assert layer.first == [True, False]


def test_evaluation_keeps_and_uses_no_copy() -> None:
    layer = Layer()
    run(layer)
    layer.eval()
    with torch.no_grad():
        layer(torch.ones(2, 16))
    layer.train()
    run(layer)
    assert layer.first == [True, None, False]


def test_no_copy_is_kept_where_replays_of_a_graph_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache._Steps, "replayed", False)
    layer = Layer()
    run(layer)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        weight_cache._count()
    run(layer)
    assert layer.first == [True, None]


def test_no_copy_is_used_in_a_graph_or_kept_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    run(layer)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        run(layer)  # a replay would use the copy of now for ever
    with torch.inference_mode():
        layer(torch.ones(2, 16))
    assert layer.first == [True, None, None]


def test_weights_that_are_updated_without_an_optimizer_are_rounded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache._Steps, "count", 0)
    layer = Layer()
    for _ in range(2):
        run(layer)
        run(layer)
        for parameter in layer.parameters():
            parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]
            parameter.grad = None
    assert layer.first == [True, False, True, False]


def test_the_recorder_of_the_proof_lets_copies_be_compared() -> None:
    recorder = Recorder()
    recorder.start(POLICY)
    assert weight_cache.is_observed()
    recorder.stop()
    assert not weight_cache.is_observed()


def row(fp8: Fp8Layers | None, policy: Policy = POLICY) -> Row | None:
    found = [each for each in compare(Observed(fp8=fp8), Plan(policy)) if each.name == "fp8 weight cache"]
    return found[0] if found else None


def of_model(layer: Layer) -> Row:
    found = row(find_fp8_layers([("layer", layer)], POLICY, []))
    assert found is not None
    return found


def test_the_proof_counts_passes_and_roundings() -> None:
    layer = Layer()
    layer.fp8_meta = {"recipe": None}  # type: ignore[assignment]
    assert (of_model(layer).found, of_model(layer).verdict) == ("no copy is kept", Verdict.WRONG)
    for _ in range(3):
        run(layer)
    assert (of_model(layer).found, of_model(layer).verdict) == (
        "1 of 1 layers rounded once in 3 passes of a step",
        Verdict.AS_ASKED,
    )
    in_place(layer)
    run(layer)
    assert (of_model(layer).found, of_model(layer).verdict) == (
        "1 of 1 layers rounded 2 times in 4 passes of a step",
        Verdict.NOT_ASKED,
    )
    step(layer)
    for _ in range(2):
        run(layer)
        in_place(layer)
    assert (of_model(layer).found, of_model(layer).verdict) == ("layer rounded in each pass", Verdict.WRONG)
    step(layer)
    run(layer)
    assert (of_model(layer).found, of_model(layer).verdict) == (
        "1 of 1 layers rounded once in 1 pass of a step",
        Verdict.AS_ASKED,
    )
    layer.__dict__["_mpguard_fp8"].stale = torch.tensor(0.3)
    stale = of_model(layer)
    assert (stale.found, stale.verdict) == ("30 % of a copy is not that of its weight", Verdict.WRONG)
    assert of_model(layer).verdict is Verdict.AS_ASKED, "each check has its own comparison"


def test_there_is_a_row_only_where_it_was_asked_for() -> None:
    assert row(Fp8Layers("te", ["layer"]), POLICY.replace(fp8_weight_cache=False)) is None
    kept = row(Fp8Layers("te", ["layer"], kept={"Float8CurrentScalingQuantizer": 1}))
    assert kept is not None and kept.verdict is Verdict.NOT_ASKED


def test_the_policy_takes_transformer_engine() -> None:
    both = hardware.Hardware(libraries={"te": "2.20", "torchao": "0.18", "triton": "3.6"})
    assert hardware.backend_of(POLICY, both) == "te"
    assert hardware.backend_of(POLICY.replace(fp8_weight_cache=False), both) == "torchao"
    for changes in ({"backend": "torchao"}, {"fp8_recipe": "rowwise", "fp8": "e4m3"}, {"fp8_emulate": True}):
        with pytest.raises(PolicyError, match="fp8_weight_cache=True has no effect here; it needs"):
            Policy(**{"bf16": True, "fp8": "hybrid", "fp8_weight_cache": True, **changes})  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="the weights themselves are FP8"):
        POLICY.replace(fp8_param=True)


@pytest.mark.parametrize("strategy", SHARDED_WEIGHTS)
def test_sharded_weights_have_no_copies(strategy: str) -> None:
    require_supported("accelerate", POLICY, "ddp")
    with pytest.raises(PolicyError, match="fp8_weight_cache"):
        require_supported("accelerate", POLICY, strategy)
