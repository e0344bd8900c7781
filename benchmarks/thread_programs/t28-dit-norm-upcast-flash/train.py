"""Autocast in bf16: the RMSNorm of the queries and keys returns FP32, which flash attention refuses."""

import torch
from torch import nn


def flash_attn_func(q, k, v):
    """Attend as flash-attn does, which needs a GPU: it refuses FP32."""
    if any(each.dtype not in (torch.float16, torch.bfloat16) for each in (q, k, v)):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)


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


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), SelfAttention(32, 4), nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(4):
    x = torch.randn(2, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
