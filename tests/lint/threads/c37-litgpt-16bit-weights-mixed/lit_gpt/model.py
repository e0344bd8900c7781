import json
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    block_size: int = 2048
    padded_vocab_size: int = 50688
    n_layer: int = 16
    n_head: int = 32
    n_embd: int = 4096

    @classmethod
    def from_checkpoint(cls, d):
        raw = json.loads((d / "lit_config.json").read_text())
        return cls(**{k: raw[k] for k in cls.__dataclass_fields__ if k in raw})


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.n_head
        self.norm_1, self.norm_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn, self.proj = nn.Linear(c.n_embd, 3 * c.n_embd), nn.Linear(c.n_embd, c.n_embd)
        self.fc, self.out = nn.Linear(c.n_embd, 4 * c.n_embd), nn.Linear(4 * c.n_embd, c.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        n = self.norm_1(x)
        q, k, v = (t.view(B, T, self.h, -1).transpose(1, 2) for t in self.attn(n).split(C, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        return x + self.proj(y) + self.out(F.gelu(self.fc(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.padded_vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.padded_vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for b in self.h:
            x = b(x)
        return self.lm_head(self.ln_f(x))


def chunked_cross_entropy(logits, targets, chunk_size=128):
    l, t = logits.reshape(-1, logits.size(-1)).split(chunk_size), targets.reshape(-1).split(chunk_size)
    losses = [F.cross_entropy(a, b, ignore_index=-1, reduction="none") for a, b in zip(l, t)]
    return torch.cat(losses).sum() / max(1, (targets != -1).sum())
