import torch
from torch import nn


class VQEncoder(nn.Module):
    def __init__(self, codes=16384, dim=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.SiLU(), nn.Conv2d(64, 128, 4, 4), nn.SiLU(), nn.Conv2d(128, dim, 1))
        self.codebook = nn.Embedding(codes, dim)

    @torch.no_grad()
    def encode(self, x):
        z = self.enc(x.to(self.enc[0].weight.dtype)).flatten(2).transpose(1, 2)
        return torch.cdist(z.float(), self.codebook.weight.float()[None]).argmin(-1)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        h = self.n1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


class AiM(nn.Module):
    def __init__(self, dim=768, depth=12, heads=12, codes=16384, classes=1000, length=256):
        super().__init__()
        self.vqvae = VQEncoder(codes).requires_grad_(False)
        self.cls = nn.Embedding(classes, dim)
        self.tok = nn.Embedding(codes, dim)
        self.pos = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.projector = nn.Linear(dim, codes, bias=False)

    def get_projector_weight_dtype(self):
        return self.projector.weight.dtype

    def forward(self, x, c):
        code = self.vqvae.encode(x)
        seq = torch.cat([self.cls(c)[:, None], self.tok(code[:, :-1])], dim=1) + self.pos[:code.shape[1]]
        mask = torch.triu(torch.ones(seq.shape[1], seq.shape[1], dtype=torch.bool, device=seq.device), 1)
        for blk in self.blocks:
            seq = blk(seq, mask)
        return self.projector(self.norm(seq)), code


AiM_models = {"AiM-B": lambda: AiM(), "AiM-L": lambda: AiM(1024, 24, 16)}
