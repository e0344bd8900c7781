import math

import torch
from flash_attn import flash_attn_func
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(x)), self.v(x)
        q, k, v = (t.view(b, n, self.heads, d // self.heads) for t in (q, k, v))
        return self.o(flash_attn_func(q, k, v).flatten(2))


class DiTBlock(nn.Module):
    def __init__(self, dim, heads, ffn_dim, eps=1e-6):
        super().__init__()
        self.self_attn = SelfAttention(dim, heads)
        self.norm1 = nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim ** 0.5)

    def forward(self, x, t_mod):
        s1, c1, g1, s2, c2, g2 = (self.modulation + t_mod).chunk(6, dim=1)
        input_x = self.norm1(x) * (1 + c1) + s1
        x = x + g1 * self.self_attn(input_x)
        input_x = self.norm2(x) * (1 + c2) + s2
        return x + g2 * self.ffn(input_x)


class WanModel(nn.Module):
    def __init__(self, dim=1536, heads=12, ffn_dim=8960, layers=30, in_dim=16, freq_dim=256):
        super().__init__()
        self.freq_dim = freq_dim
        self.patch = nn.Linear(in_dim * 4, dim)
        self.pose = nn.Linear(in_dim * 4, dim)
        self.time_embedding = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim * 6))
        self.blocks = nn.ModuleList(DiTBlock(dim, heads, ffn_dim) for _ in range(layers))
        self.head = nn.Linear(dim, in_dim * 4)

    def forward(self, x, pose, t):
        f = torch.exp(-math.log(10000) * torch.arange(self.freq_dim // 2, device=t.device) / (self.freq_dim // 2))
        emb = torch.cat([(t[:, None] * f).cos(), (t[:, None] * f).sin()], dim=-1).to(x.dtype)
        t_mod = self.time_projection(self.time_embedding(emb)).unflatten(1, (6, -1))
        x = self.patch(x) + self.pose(pose)
        for blk in self.blocks:
            x = blk(x, t_mod)
        return self.head(x)
