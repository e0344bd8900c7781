import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class DiTBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.fc1 = nn.Linear(dim, dim * 4)
        self.fc2 = nn.Linear(dim * 4, dim)
        self.ada = nn.Linear(dim, dim * 4)

    def forward(self, x, c):
        s1, b1, s2, b2 = self.ada(c)[:, None].chunk(4, -1)
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x) * (1 + s1) + b1).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.proj(a)
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x) * (1 + s2) + b2)))


class AnimaDiT(nn.Module):
    def __init__(self, channels=16, dim=1024, depth=16, heads=16, cond_dim=1024):
        super().__init__()
        self.inp = nn.Conv2d(channels, dim, 2, 2)
        self.t = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.c = nn.Linear(cond_dim, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim, heads) for _ in range(depth))
        self.out = nn.ConvTranspose2d(dim, channels, 2, 2)
        self.gradient_checkpointing = False

    def forward(self, x, t, cond):
        h = self.inp(x)
        shape = h.shape
        h = h.flatten(2).transpose(1, 2)
        c = self.t(t[:, None]) + self.c(cond.mean(1))
        for blk in self.blocks:
            h = checkpoint(blk, h, c, use_reentrant=False) if self.gradient_checkpointing and self.training else blk(h, c)
        return self.out(h.transpose(1, 2).reshape(shape))
