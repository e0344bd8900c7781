"""The matmuls that autograd's graph implies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
from processes import transcript
from short_programs import run
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


class Normalized(nn.Module):
    """A layer whose weight is made of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


DATA = torch.randn(3, 8)


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda layer: (layer(DATA) @ layer(DATA).T).sum(), 1),  # similarities
        (lambda layer: (layer(DATA) @ DATA.T).sum(), 1),  # to data
        (lambda layer: layer(DATA).sum() + (layer.weight @ layer.weight.T).sum(), 1),  # a penalty of weights
        (lambda layer: (DATA @ (layer.weight @ layer.weight)).sum(), 0),  # a weight that is made of others
        (lambda layer: (layer(DATA) @ layer(DATA).T @ layer.weight[:3]).sum(), 0),  # attention before a layer
        (lambda layer: (layer(DATA).bfloat16() @ DATA.T.bfloat16()).sum(), 0),  # 16 bits
        (lambda _: Normalized()(DATA).sum(), 0),
    ],
    ids=["similarities", "to data", "penalty", "made weight", "attention", "16 bits", "normalized"],
)
def test_matmuls_in_the_loss_are_those_whose_result_no_weight_multiplies(loss: Callable[..., Any], count: int) -> None:
    assert len(products_behind([loss(nn.Linear(8, 8, bias=False))]).in_the_loss) == count


#: Losses in FP32 outside of autocast that multiply more than the model.
LOSSES = {
    "orthogonal": "sum((p.T @ p - torch.eye(p.size(1))).pow(2).sum() for p in m.parameters() if p.ndim == 2)",
    "covariance": "(z.T @ z / len(z) - torch.eye(z.size(1))).pow(2).mean()",
    "kernel": "-(z @ y.T).exp().mean() + (z @ z.T).exp().mean()",
    "cholesky": "(y[:, :1].T @ torch.cholesky_solve(y[:, :1], torch.linalg.cholesky(z @ z.T + 9 * torch.eye(len(z)))))"
    ".sum()",
}

FITTED = """
m = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64)); o = adam(m)
for _ in range(4):
    x, y = torch.randn(64, 16), torch.randn(64, 64)
    with amp(): z = m(x)
    z = 0.1 * z.float(); loss = z.pow(2).mean() + LOSS
    loss.backward(); o.step(); o.zero_grad()
"""


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_may_multiply_in_fp32_more_than_the_model_does(tmp_path: Path, name: str) -> None:
    ended = run(tmp_path, FITTED.replace("LOSS", LOSSES[name]))
    assert ended.returncode == 0 and "in force at steps 1-4" in ended.stderr, transcript(ended)
    assert "compute        bf16  " in ended.stderr, transcript(ended)


def test_a_layer_outside_of_autocast_is_no_loss(tmp_path: Path) -> None:
    layers = FITTED.replace("LOSS", "(z @ w).pow(2).mean()").replace("o = adam(m)", "w = nn.Parameter(torch.eye(64))")
    layers = layers.replace("for _", "o = torch.optim.AdamW([*m.parameters(), w])\nfor _")
    ended = run(tmp_path, layers)
    assert ended.returncode == 1 and "code outside of modules" in ended.stderr, transcript(ended)
