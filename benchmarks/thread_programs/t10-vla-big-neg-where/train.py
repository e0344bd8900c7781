"""A policy under FP16 autocast whose eager attention masks its scores with -2.38e38."""

import torch
from torch import nn


class ExpertLayer(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def eager_attention(self, attention_mask, query_states, key_states, value_states):
        att_weights = torch.matmul(query_states, key_states.transpose(2, 3))
        att_weights *= self.head_dim**-0.5
        big_neg = -2.3819763e38
        masked_att_weights = torch.where(attention_mask[:, None, :, :], att_weights, big_neg)
        probs = nn.functional.softmax(masked_att_weights, dim=-1).to(dtype=value_states.dtype)
        return torch.matmul(probs, value_states).transpose(1, 2)

    def forward(self, x, attention_mask):
        h = self.norm1(x)
        q, k, v = (f(h).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(self.eager_attention(attention_mask, q, k, v).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(self, dim=32, actions=4):
        super().__init__()
        self.inp, self.out = nn.Linear(actions, dim), nn.Linear(dim, actions)
        self.layers = nn.ModuleList(ExpertLayer(dim) for _ in range(2))

    def forward(self, batch):
        noise = torch.randn_like(batch["action"])
        x = self.inp(batch["action"] + noise)
        pad = batch["pad"]
        for layer in self.layers:
            x = layer(x, pad[:, None, :] & pad[:, :, None])
        return nn.functional.mse_loss(self.out(x)[pad], noise[pad])


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=2.5e-5)
scaler = torch.amp.GradScaler("cpu")
for _ in range(4):
    lengths = torch.randint(4, 9, (4, 1))
    batch = {"action": torch.randn(4, 8, 4), "pad": torch.arange(8)[None] < lengths}
    batch["pad"][0] = True
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        loss = policy(batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0, error_if_nonfinite=False)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
