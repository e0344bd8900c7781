"""Modules that are computed in FP32, compiled. In a run: tests/runtime/test_fp32_modules.py."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch._dynamo.testing import CompileCounter

import mpguard
from mpguard.nn import fp32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


def test_equal_blocks_share_one_graph() -> None:
    """A number of each module in its graph made one graph per block, until the recompile limit ended compilation."""
    net = nn.Sequential(*(Block() for _ in range(10)))
    policy = mpguard.recipe("bf16_mixed").replace(fp32_modules=("*norm*",))
    fp32.keep(list(net.named_modules()), policy)
    torch._dynamo.reset()
    count = CompileCounter()
    for block in net:
        block.compile(backend=count)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(torch.randn(8, 32)).sum().backward()
    assert count.frame_count == 2, "the first input needs no gradient"
    assert all(vars(block.norm)[fp32.MARK].compiled == {"fp32"} for block in net)


def test_modules_of_several_kinds_are_compiled_without_a_graph_break() -> None:
    """In modules of FSDP2, an `int` that differs is a symbol for dynamo: a graph break, and an error of torch 2.11."""
    net = nn.Sequential(nn.LayerNorm(32), nn.RMSNorm(32), nn.Linear(32, 32))
    fp32.keep(list(net.named_modules()), mpguard.recipe("bf16_mixed").replace(fp32_modules=("0", "1", "2")))
    states = [vars(module)[fp32.MARK] for module in net]
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def recorded(state: fp32.Fp32State, x: torch.Tensor) -> torch.Tensor:
        fp32._record_compiled(state.kind, x.dtype)
        return x + 1

    for state in states:
        recorded(state, torch.randn(8, 32))
    assert all(state.compiled == {"fp32"} for state in states)
