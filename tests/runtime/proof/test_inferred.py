"""The matmuls that autograd's graph implies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Mixture(nn.Module):
    """body: a layer with a residual connection. last: the layer that makes the logits; none for `body` itself."""

    def __init__(self, last: bool = True, checkpointed: bool = False) -> None:
        super().__init__()
        self.body, self.gate, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5) if last else None
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gate(x)
        x = x + self.body(x.relu())
        if self.last is None:
            return x
        return checkpoint(self.last, x, use_reentrant=True) if self.checkpointed else self.last(x)  # type: ignore[no-any-return]


Loss = Callable[[torch.Tensor], torch.Tensor]
LABELS = torch.tensor([0, 4, 2])


@pytest.mark.parametrize(
    ("model", "loss", "is_head"),
    [
        (Mixture(), lambda x: nn.functional.cross_entropy(x, LABELS), True),
        (Mixture(), lambda x: nn.functional.cross_entropy(x.bfloat16().float().reshape(3, 5), LABELS), True),
        (Mixture(), lambda x: x.log_softmax(-1).mean() + 0.1 * x.pow(2).mean(), True),
        (Mixture(), lambda x: x.pow(2).mean(), False),  # no classes
        (Mixture(last=False), lambda x: nn.functional.cross_entropy(x, LABELS), False),  # a sum of two results
        (Mixture(checkpointed=True), lambda x: nn.functional.cross_entropy(x, LABELS), False),  # hidden
        (Mixture(), lambda x: (x @ x.T).log_softmax(-1).mean(), False),  # similarities
    ],
    ids=["head", "casts", "another term", "regression", "residual", "checkpoint", "similarities"],
)
def test_a_head_is_the_layer_whose_result_alone_becomes_log_probabilities(
    model: Mixture, loss: Loss, is_head: bool
) -> None:
    rows = torch.randn(3, 8, requires_grad=True)
    found = products_behind([loss(model(rows))])
    assert found.heads == ({id(model.last.weight)} if is_head and model.last is not None else set())
