"""What is read of delayed scaling: the first pass of a step, with the scales that it computed with."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch

from mpguard.watching.detect import Fp8Ranges
from mpguard.watching.fp8 import DelayedScales

RECIPE = SimpleNamespace(margin=0, fp8_format=SimpleNamespace(value=SimpleNamespace(max_fwd=448.0, max_bwd=57344.0)))


def module(length: int) -> Any:
    """Return a module with the state of one matmul, as Transformer Engine keeps it."""
    forward = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(length, 3), recipe=RECIPE)
    backward = SimpleNamespace(scale=torch.ones(2), amax_history=torch.zeros(length, 2), recipe=RECIPE)
    return SimpleNamespace(fp8_meta={"scaling_fwd": forward, "scaling_bwd": backward, "num_gemms": 1})


def run(layer: Any, way: str, values: list[float]) -> None:
    """Do what a pass does to the state of a module: the newest values become the last row, the first row is erased."""
    state = layer.fp8_meta[way]
    state.amax_history[0] = torch.tensor(values)
    largest = state.amax_history.max(0).values
    limit = 448.0 if way == "scaling_fwd" else 57344.0
    state.scale = torch.where(largest > 0, limit / largest, state.scale)
    state.amax_history = state.amax_history.roll(-1, 0)
    state.amax_history[0] = 0


def rows(layer: Any, scales: DelayedScales, passes: int) -> dict[str, list[float]]:
    return {name: row for names, table in scales.look(passes) for name, row in zip(names, table.tolist(), strict=True)}


@pytest.mark.parametrize("length", [1, 2, 16])
def test_a_value_over_what_its_scale_allows(length: int) -> None:
    layer, scales = module(length), DelayedScales()
    run(layer, "scaling_fwd", [2.0, 1.0, 0.0])
    run(layer, "scaling_bwd", [1e-6, 0.0])
    scales.keep([("mlp", layer), ("plain", object())])  # type: ignore[list-item]
    run(layer, "scaling_fwd", [6.0, 1.0, 0.0])
    run(layer, "scaling_bwd", [5e-7, 0.0])
    found = rows(layer, scales, 1)
    assert found["mlp: input"] == pytest.approx([3.0, 6.0]) and found["mlp: weight"] == pytest.approx([1.0, 1.0])
    assert found["mlp: gradient of the output"] == pytest.approx([0.5, 5e-7])
    if length > 1:
        assert found["mlp: output"] == [0.0, 0.0], "a tensor that is not in FP8"
    assert scales.look(1) == [], "each check needs scales that were kept for it"


def test_of_several_passes_the_first_is_compared() -> None:
    """Its scale is the one that was kept; the later ones computed with others."""
    layer, scales = module(4), DelayedScales()
    run(layer, "scaling_fwd", [2.0, 1.0, 0.0])
    scales.keep([("mlp", layer)])
    for value in (6.0, 7.0, 5.0):
        run(layer, "scaling_fwd", [value, 1.0, 0.0])
    assert rows(layer, scales, 3)["mlp: input"] == pytest.approx([3.0, 6.0])
    scales.keep([("mlp", layer)])
    assert scales.look(4) == [], "the history no longer has it"


def test_other_scaling_has_nothing_to_read() -> None:
    """Current scaling has a state without a history; torchao's layers have none at all."""
    scales = DelayedScales()
    current = SimpleNamespace(fp8_meta={"scaling_fwd": SimpleNamespace(recipe=RECIPE), "recipe": RECIPE})
    scales.keep([("te", current), ("torchao", torch.nn.Linear(2, 2))])  # type: ignore[list-item]
    assert scales.look(1) == []


def test_saturation_is_found_once() -> None:
    found = Fp8Ranges()
    events = [found.add("x", times, 1.0) for times in [0.9, 1.4, 3.0, 1.0, 2.5, 4.0, 20.0]]
    assert [bool(each) for each in events] == [False] * 4 + [True, False, False]
    assert events[4] == [("fp8_saturation", 3.0)]
    assert found.add("y", 16.0, 1.0) == [("fp8_saturation", 16.0)], "once is enough if it is that much"
    assert found.add("z", math.nan, math.inf) == found.add("z", 0.0, 0.0) == []


def test_growth_is_drift_and_a_spike_is_not() -> None:
    found = Fp8Ranges()
    assert not any(found.add("x", 1.0, 40.0 if look % 7 == 6 else 1.0) for look in range(100))
    growing = [found.add("y", 1.0, 1.1**look) for look in range(100)]
    (step,) = [look for look, each in enumerate(growing) if each]
    assert 30 < step < 50 and growing[step][0][0] == "fp8_scale_drift"
