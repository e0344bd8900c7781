import math

import torch
import torch.nn.functional as F
from torch import nn


def sinusoidal_embedding(dim, t):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device, dtype=torch.float32) / half)
    args = t.float()[:, None] * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class Block(nn.Module):
    def __init__(self, dim, heads, ffn_dim):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(), nn.Linear(ffn_dim, dim))
        self.modulation = nn.Parameter(torch.zeros(1, 4, dim))

    def forward(self, x, e):
        s1, g1, s2, g2 = (self.modulation + e[:, None]).chunk(4, dim=1)
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x) * (1 + s1)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + g1 * self.proj(a)
        return x + g2 * self.ffn(self.norm2(x) * (1 + s2))


class VideoDiT(nn.Module):
    def __init__(self, in_dim=64, dim=5120, heads=40, ffn_dim=13824, layers=4, freq_dim=256):
        super().__init__()
        self.freq_dim = freq_dim
        self.patch_embedding = nn.Linear(in_dim, dim)
        self.time_embedding = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, ffn_dim) for _ in range(layers))
        self.head = nn.Linear(dim, in_dim)

    def forward(self, x, t):
        e = self.time_embedding(sinusoidal_embedding(self.freq_dim, t).to(x.dtype))
        x = self.patch_embedding(x)
        for blk in self.blocks:
            x = blk(x, e)
        return self.head(x)
