"""FSDP2 in bf16: the FP32 buffer of a rotary embedding makes the queries and keys FP32, and the values stay bf16."""

import einops
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Linear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W = nn.Parameter(torch.empty(d_in, d_out))
        self.b = nn.Parameter(torch.zeros(d_out))
        nn.init.kaiming_normal_(self.W, nonlinearity="linear")

    def forward(self, x):
        return einops.einsum(x, self.W, "... d_in, d_in d_out -> ... d_out") + self.b


class RoPEEmbedding(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def forward(self, q, k):
        t = torch.arange(q.shape[-2], device=q.device, dtype=self.inv_freq.dtype)
        freqs = torch.outer(t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos(), emb.sin()
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)


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


dist.init_process_group("gloo")
torch.manual_seed(0)
model = ImportanceNet(16, 32, 4, 2, 64)
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
for _ in range(4):
    pred = model(torch.randn(4, 8, 16))
    loss = (pred - torch.rand(4, 8, 64)).pow(2).mean() + 1e-4 * pred.abs().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
