import einops
import torch
import torch.nn as nn
import torch.nn.functional as F


class Linear(nn.Module):
    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.W = nn.Parameter(torch.empty(d_in, d_out))
        self.b = nn.Parameter(torch.zeros(d_out))
        nn.init.kaiming_normal_(self.W, nonlinearity="linear")

    def forward(self, x):
        return einops.einsum(x, self.W, "... d_in, d_in d_out -> ... d_out") + self.b


class RoPEEmbedding(nn.Module):
    def __init__(self, head_dim: int, base: float = 10000.0):
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @staticmethod
    def _rotate_half(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)

    def _apply_rotation(self, x, cos, sin):
        return x * cos + self._rotate_half(x) * sin

    def forward(self, q, k):
        t = torch.arange(q.shape[-2], device=q.device, dtype=self.inv_freq.dtype)
        freqs = torch.outer(t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos(), emb.sin()
        return self._apply_rotation(q, cos, sin), self._apply_rotation(k, cos, sin)


class SelfAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.rope = RoPEEmbedding(dim // n_heads)

    def forward(self, x):
        q, k, v = einops.rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.n_heads)
        q, k = self.rope(q, k)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(einops.rearrange(y, "b h t d -> b t (h d)"))


class Block(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = SelfAttention(dim, n_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class ImportanceNet(nn.Module):
    def __init__(self, d_act, dim, n_heads, n_layers, n_components):
        super().__init__()
        self.inp = Linear(d_act, dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads) for _ in range(n_layers))
        self.out = Linear(dim, n_components)

    def forward(self, acts):
        x = self.inp(acts)
        for b in self.blocks:
            x = b(x)
        return torch.sigmoid(self.out(x))
