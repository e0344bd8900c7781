"""The matmuls that autograd's graph implies."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn

from mpguard.runtime.proof.inferred import products_behind


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_have_matmuls_of_an_unknown_length(layout: torch.layout) -> None:
    layer = nn.Linear(8, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)
        found = products_behind([torch.cat(list(layer(rows).unbind())).sum()])
    assert found.weights == {id(layer.weight)} and found.leaves == {id(layer.weight), id(layer.bias)}
    assert set(found.work) == {("fp32", id(layer.weight))} and found.work.total() >= 8
