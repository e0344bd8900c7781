"""A small GPT over bytes and a corpus that is on every machine: Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Attention and MLP, pre-norm. Input and output: (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (self.heads, x.shape[-1] // self.heads)
        q, k, v = (t.unflatten(-1, split).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens (batch, tokens) of int64 to logits (batch, tokens, 256)."""

    def __init__(self, width: int = 128, heads: int = 4, blocks: int = 4, context: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def corpus(megabytes: float = 2) -> torch.Tensor:
    """Return the first megabytes of the standard library's source, as int64 bytes."""
    wanted = int(megabytes * 1e6)
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= wanted:
            break
    return torch.frombuffer(text[:wanted], dtype=torch.uint8).long()


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of `context` tokens; the labels are the window one byte later."""

    def __init__(self, text: torch.Tensor, context: int = 128) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def loader(batch: int = 16, context: int = 128, seed: int = 0) -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(
        Windows(corpus(), context), batch, shuffle=True, generator=generator, drop_last=True
    )


def batches(steps: int, rank: int = 0, batch: int = 16) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches for one rank of a loop without a framework; each rank has its own order."""
    for step, each in enumerate(loader(batch, seed=rank)):
        if step == steps:
            return
        yield each


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats per byte, in FP32; a uniform guess is ln 256 = 5.55."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
