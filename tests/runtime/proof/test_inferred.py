"""The matmuls that autograd's graph implies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn

from mpguard.runtime.proof.inferred import products_behind

TABLE, ROWS = nn.Parameter(torch.randn(8, 4)), torch.tensor([0, 3, 3])


@pytest.mark.parametrize(
    ("loss", "nothing"),
    [
        (lambda: (TABLE[ROWS] * nn.functional.embedding(ROWS, TABLE)).sum() + TABLE.pow(2), True),
        (lambda: nn.functional.embedding_bag(ROWS[None], TABLE.bfloat16()), True),
        (lambda: torch.sparse.mm(torch.eye(8).to_sparse(), TABLE), True),
        (lambda: nn.Parameter(torch.ones(4)) * torch.ones(4), True),
        (lambda: TABLE[ROWS] @ torch.ones(4), False),
        (lambda: TABLE[None] * torch.ones(5, 8, 4), False),
        (lambda: TABLE[ROWS] * nn.Parameter(torch.ones(3, 4)), False),
        (lambda: Doubled.apply(TABLE).index_select(0, ROWS), False),
    ],
    ids=["lookup", "bag", "sparse", "vector", "matmul", "a matrix, by elements", "another matrix", "own function"],
)
def test_tables_and_vectors_alone_multiply_nothing(loss: Callable[[], torch.Tensor], nothing: bool) -> None:
    assert products_behind([loss().sum()]).multiplies_nothing is nothing


class Doubled(torch.autograd.Function):
    """A function whose backward pass could multiply."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_have_matmuls_of_an_unknown_length(layout: torch.layout) -> None:
    layer = nn.Linear(8, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)
        found = products_behind([torch.cat(list(layer(rows).unbind())).sum()])
    assert found.weights == {id(layer.weight)} and found.leaves == {id(layer.weight), id(layer.bias)}
    assert set(found.work) == {("fp32", id(layer.weight))} and found.work.total() >= 8
