"""Matmuls in dynamo's graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the real library runs here")
from torch import nn

from mpguard.runtime.proof import graphs


class Rotary(nn.Module):
    """Angles are a matmul in FP32 without a gradient, as in transformers 5.0; the layer computes in BF16."""

    def __init__(self, angles_are_trained: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.frequencies = nn.Parameter(torch.ones(8, 1), requires_grad=angles_are_trained)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            angles = self.frequencies @ torch.ones(1, 8)
        return self.linear(x) + angles.sin()


@pytest.mark.parametrize("angles_are_trained", [False, True])
def test_products_without_a_gradient_are_not_trained(angles_are_trained: bool) -> None:
    found: list[tuple[Counter[Any], Counter[Any]]] = []

    def backend(module: Any, _inputs: Any) -> Any:
        found.append((graphs.products_in_graph(module), graphs.products_in_graph(module, trained=True)))
        return module.forward

    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(Rotary(angles_are_trained), backend=backend)(torch.randn(8, 8))
    [(every, trained)] = found
    assert {dtype for dtype, _ in every} == {"fp32", "bf16"}
    assert {dtype for dtype, _ in trained} == ({"fp32", "bf16"} if angles_are_trained else {"bf16"})
