"""DDP with autocast in bf16: the cached tables of the rotary embedding are rounded to bf16."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Rotary(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.seq_len_cached = None

    def forward(self, x):
        seq_len = x.shape[1]
        if seq_len != self.seq_len_cached:
            self.seq_len_cached = seq_len
            t = torch.arange(seq_len, device=x.device).type_as(self.inv_freq)
            freqs = torch.outer(t, self.inv_freq.to(x.device))
            self.cos_cached = freqs.cos().bfloat16()
            self.sin_cached = freqs.sin().bfloat16()
        return self.cos_cached[None, :, None, :], self.sin_cached[None, :, None, :]


def apply_rotary_emb(x, cos, sin):
    x1, x2 = x.chunk(2, dim=3)
    return torch.cat([x1 * cos + x2 * sin, -x1 * sin + x2 * cos], 3).type_as(x)


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_q, self.c_k, self.c_v = (nn.Linear(n_embd, n_embd, bias=False) for _ in range(3))
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd))
        self.rotary = Rotary(n_embd // n_head)

    def forward(self, x):
        h = F.rms_norm(x, (x.size(-1),))
        q, k, v = (each(h).view(*x.shape[:2], self.n_head, -1) for each in (self.c_q, self.c_k, self.c_v))
        cos, sin = self.rotary(q)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view_as(x))
        return x + self.mlp(F.rms_norm(x, (x.size(-1),)))


class GPT(nn.Module):
    def __init__(self, vocab_size=256, n_embd=32, n_head=4):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(2))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, target):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(F.rms_norm(x, (x.size(-1),))).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(GPT())
ctx = torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), lr=0.0018, betas=(0.9, 0.95), fused=True)
for _ in range(4):
    x = torch.randint(0, 256, (2, 33))
    with ctx:
        loss = model(x[:, :-1], x[:, 1:].contiguous())
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
