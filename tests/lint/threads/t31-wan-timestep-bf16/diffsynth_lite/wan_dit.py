import torch
import torch.nn.functional as F
from torch import nn


def sinusoidal_embedding_1d(dim, position):
    sinusoid = torch.outer(position.type(torch.float64),
                           torch.pow(10000, -torch.arange(dim // 2, dtype=torch.float64, device=position.device).div(dim // 2)))
    x = torch.cat([torch.cos(sinusoid), torch.sin(sinusoid)], dim=1)
    return x.to(position.dtype)


class Block(nn.Module):
    def __init__(self, dim, heads, ffn_dim):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim ** 0.5)

    def forward(self, x, t_mod):
        s1, c1, g1, s2, c2, g2 = (self.modulation.to(dtype=t_mod.dtype) + t_mod).chunk(6, dim=1)
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x) * (1 + c1) + s1).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + g1 * self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + g2 * self.ffn(self.norm2(x) * (1 + c2) + s2)


class WanModel(nn.Module):
    def __init__(self, dim=1536, heads=12, ffn_dim=8960, layers=30, in_dim=64, text_dim=4096, freq_dim=256):
        super().__init__()
        self.freq_dim = freq_dim
        self.patch_embedding, self.text_embedding = nn.Linear(in_dim, dim), nn.Linear(text_dim, dim)
        self.time_embedding = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim * 6))
        self.blocks = nn.ModuleList(Block(dim, heads, ffn_dim) for _ in range(layers))
        self.head = nn.Linear(dim, in_dim)

    def forward(self, x, timestep, context):
        t = self.time_embedding(sinusoidal_embedding_1d(self.freq_dim, timestep))
        t_mod = self.time_projection(t).unflatten(1, (6, -1))
        n = x.shape[1]
        x = torch.cat([self.patch_embedding(x), self.text_embedding(context)], dim=1)
        for blk in self.blocks:
            x = torch.utils.checkpoint.checkpoint(blk, x, t_mod, use_reentrant=False)
        return self.head(x[:, :n])
