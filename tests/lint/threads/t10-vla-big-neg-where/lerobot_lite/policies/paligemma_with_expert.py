import torch
from torch import nn


def apply_rope(x, positions, max_wavelength=10_000):
    d_half = x.shape[-1] // 2
    x = x.to(torch.float32)
    freq = max_wavelength ** ((2.0 / x.shape[-1]) * torch.arange(d_half, dtype=torch.float32, device=x.device))
    radians = (positions[..., None].to(torch.float32) / freq)[..., None, :]
    sin, cos = torch.sin(radians), torch.cos(radians)
    x1, x2 = x.split(d_half, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


class ExpertLayer(nn.Module):
    def __init__(self, dim, heads, head_dim):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def eager_attention(self, attention_mask, query_states, key_states, value_states):
        query_states, key_states = query_states.transpose(1, 2), key_states.transpose(1, 2)
        att_weights = torch.matmul(query_states, key_states.transpose(2, 3))
        att_weights *= self.head_dim ** -0.5
        big_neg = -2.3819763e38
        masked_att_weights = torch.where(attention_mask[:, None, :, :], att_weights, big_neg)
        probs = nn.functional.softmax(masked_att_weights, dim=-1)
        probs = probs.to(dtype=value_states.dtype)
        out = torch.matmul(probs, value_states.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        return out.reshape(out.shape[0], -1, self.heads * self.head_dim)

    def forward(self, x, attention_mask, positions):
        b, n, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, n, self.heads, self.head_dim) for f in (self.q, self.k, self.v))
        q, k = apply_rope(q, positions), apply_rope(k, positions)
        x = x + self.o(self.eager_attention(attention_mask, q, k, v))
        return x + self.mlp(self.norm2(x))


class PrefixSuffixModel(nn.Module):
    def __init__(self, dim=512, heads=8, head_dim=64, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(dim, heads, head_dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, embs, pad_masks, att_masks):
        cumsum = torch.cumsum(att_masks, dim=1)
        att_2d = cumsum[:, None, :] <= cumsum[:, :, None]
        att_2d = att_2d & (pad_masks[:, None, :] * pad_masks[:, :, None]).bool()
        positions = torch.cumsum(pad_masks, dim=1) - 1
        for layer in self.layers:
            embs = layer(embs, att_2d, positions)
        return self.norm(embs)
