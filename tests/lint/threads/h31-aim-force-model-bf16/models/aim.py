import torch
from torch import nn


class VQEncoder(nn.Module):
    def __init__(self, codebook=16384, dim=8, width=128):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, width, 4, 4), nn.GroupNorm(32, width), nn.SiLU(),
            nn.Conv2d(width, width, 4, 4), nn.SiLU(), nn.Conv2d(width, dim, 1),
        )
        self.codebook = nn.Embedding(codebook, dim)

    def forward(self, x):
        z = self.conv(x).flatten(2).transpose(1, 2)
        d = torch.cdist(z.float(), self.codebook.weight.float()[None])
        return d.argmin(-1)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.ln2(x))


class AiM(nn.Module):
    def __init__(self, num_classes=1000, codebook=16384, dim=768, depth=24, heads=12, length=256):
        super().__init__()
        self.vqvae = VQEncoder(codebook)
        self.vqvae.requires_grad_(False)
        self.cls = nn.Embedding(num_classes + 1, dim)
        self.tok = nn.Embedding(codebook, dim)
        self.pos = nn.Parameter(torch.zeros(1, length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.projector = nn.Linear(dim, codebook)

    def get_projector_weight_dtype(self):
        return self.projector.weight.dtype

    def encode(self, x):
        return self.vqvae(x)

    def forward(self, tokens, labels):
        h = torch.cat([self.cls(labels)[:, None], self.tok(tokens)], 1)
        h = h + self.pos[:, : h.shape[1]]
        for blk in self.blocks:
            h = blk(h)
        return self.projector(self.norm(h))
