import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads=12):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = (q @ k.transpose(-2, -1)) * (d // self.heads) ** -0.5
        x = x + self.proj((a.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.n2(x))


class ResBlock(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.ln = nn.LayerNorm(w)
        self.mlp = nn.Sequential(nn.Linear(w, w), nn.SiLU(), nn.Linear(w, w))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(w, 3 * w))

    def forward(self, x, y):
        shift, scale, gate = self.ada(y).chunk(3, dim=-1)
        return x + gate * self.mlp(self.ln(x) * (1 + scale) + shift)


class DiffLoss(nn.Module):
    def __init__(self, c, z, depth, w):
        super().__init__()
        self.inp, self.cond = nn.Linear(c, w), nn.Linear(z, w)
        self.time = nn.Sequential(nn.Linear(256, w), nn.SiLU(), nn.Linear(w, w))
        self.res = nn.ModuleList(ResBlock(w) for _ in range(depth))
        self.out = nn.Linear(w, c)
        ac = torch.cos((torch.linspace(0, 1, 1000) + 0.008) / 1.008 * math.pi / 2) ** 2
        self.register_buffer("ac", ac.clamp(1e-5, 1))

    def forward(self, target, z, mask):
        t = torch.randint(0, 1000, (target.shape[0],), device=target.device)
        noise = torch.randn_like(target)
        a = self.ac[t][:, None]
        xt = a.sqrt() * target + (1 - a).sqrt() * noise
        f = torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 128)
        te = torch.cat([(t[:, None] * f).cos(), (t[:, None] * f).sin()], dim=-1)
        h, y = self.inp(xt), self.time(te) + self.cond(z)
        for r in self.res:
            h = r(h, y)
        l = ((self.out(h) - noise) ** 2).mean(-1)
        return (l * mask).sum() / mask.sum()


class MAR(nn.Module):
    def __init__(self, dim, depth, d, w, mul, c=16, n_tokens=1024, classes=101):
        super().__init__()
        self.mul = mul
        self.proj, self.cls = nn.Linear(c, dim), nn.Embedding(classes, dim)
        self.ln = nn.LayerNorm(dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, n_tokens, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.diffloss = DiffLoss(c, dim, d, w)

    def forward(self, imgs, labels):
        x = imgs.flatten(2).transpose(1, 2)
        b, n, c = x.shape
        mask = (torch.rand(b, n, device=x.device) < 0.7 + 0.3 * torch.rand(1, device=x.device)).float()
        h = self.proj(x) * (1 - mask)[..., None] + self.mask_token * mask[..., None]
        h = self.ln(torch.cat([self.cls(labels)[:, None], h + self.pos[:, :n]], dim=1))
        for blk in self.blocks:
            h = blk(h)
        z = h[:, 1:]
        rep = lambda t: t.reshape(b * n, *t.shape[2:]).repeat(self.mul, *([1] * (t.dim() - 2)))
        return self.diffloss(rep(x.detach()), rep(z), rep(mask))
