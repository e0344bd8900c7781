import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 4), nn.GELU(), nn.Linear(dim * 4, dim))

    def forward(self, x, pad):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, key_padding_mask=pad, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class HunyuanTransformer(nn.Module):
    def __init__(self, channels=16, dim=3072, depth=20, heads=24, text_dim=4096):
        super().__init__()
        self.inp = nn.Linear(channels, dim)
        self.text = nn.Linear(text_dim, dim)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.out = nn.Linear(dim, channels)
        self.ckpt = False

    def enable_checkpointing(self):
        self.ckpt = True

    def forward(self, latents, embeds, t, mask):
        b, c = latents.shape[:2]
        x = self.inp(latents.flatten(2).transpose(1, 2))
        n = x.shape[1]
        x = torch.cat([x, self.text(embeds)], 1) + self.time(t[:, None] / 1000)[:, None]
        pad = torch.cat([torch.zeros(b, n, dtype=torch.bool, device=x.device), mask == 0], 1)
        for blk in self.blocks:
            x = checkpoint(blk, x, pad, use_reentrant=False) if self.ckpt else blk(x, pad)
        return self.out(x[:, :n]).transpose(1, 2).reshape(latents.shape)


def load_transformer(model_type, path, dtype):
    model = HunyuanTransformer()
    weights = os.path.join(path, "transformer.pt")
    if os.path.exists(weights):
        model.load_state_dict(torch.load(weights, map_location="cpu"))
    return model.to(dtype)
