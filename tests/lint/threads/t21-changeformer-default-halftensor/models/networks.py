import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, heads, sr, drop_path):
        super().__init__()
        self.heads, self.drop_path = heads, drop_path
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.sr = nn.Conv2d(dim, dim, sr, sr) if sr > 1 else None
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attn(self, x, hw):
        b, n, c = x.shape
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2)
        if self.sr is not None:
            x = self.sr(x.transpose(1, 2).reshape(b, c, *hw)).flatten(2).transpose(1, 2)
        k, v = self.kv(x).view(b, -1, 2, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5
        return self.proj((a.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x, hw):
        keep = 1.0 if not self.training else float(np.random.rand() >= self.drop_path)
        x = x + keep * self.attn(self.norm1(x), hw)
        return x + keep * self.mlp(self.norm2(x))


class ChangeFormerLite(nn.Module):
    def __init__(self, embed_dim=256, n_class=2, dims=(64, 128, 320), heads=(1, 2, 5), srs=(8, 4, 2)):
        super().__init__()
        dpr = [float(x) for x in np.linspace(0, 0.1, len(dims))]
        self.embeds, self.stages = nn.ModuleList(), nn.ModuleList()
        c = 3
        for i, d in enumerate(dims):
            self.embeds.append(nn.Conv2d(c, d, 7 if i == 0 else 3, 4 if i == 0 else 2, 3 if i == 0 else 1))
            self.stages.append(Block(d, heads[i], srs[i], dpr[i]))
            c = d
        self.diff = nn.ModuleList(nn.Sequential(nn.Conv2d(2 * d, embed_dim, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(embed_dim)) for d in dims)
        self.fuse = nn.Conv2d(embed_dim * len(dims), embed_dim, 1)
        self.head = nn.Conv2d(embed_dim, n_class, 3, padding=1)

    def encode(self, x):
        feats = []
        for e, s in zip(self.embeds, self.stages):
            x = e(x)
            hw = x.shape[2:]
            x = s(x.flatten(2).transpose(1, 2), hw).transpose(1, 2).reshape(x.shape)
            feats.append(x)
        return feats

    def forward(self, a, b):
        fa, fb = self.encode(a), self.encode(b)
        ds = [m(torch.cat(p, dim=1)) for m, p in zip(self.diff, zip(fa, fb))]
        ds = [F.interpolate(d, size=ds[0].shape[2:], mode="bilinear") for d in ds]
        return F.interpolate(self.head(self.fuse(torch.cat(ds, dim=1))), scale_factor=4, mode="bilinear")
