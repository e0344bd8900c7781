import glob
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Rotary(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.seq_len_cached = None
        self.cos_cached = None
        self.sin_cached = None

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
    d = x.shape[3] // 2
    x1, x2 = x[..., :d], x[..., d:]
    return torch.cat([x1 * cos + x2 * sin, -x1 * sin + x2 * cos], 3).type_as(x)


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.head_dim = cfg.n_head, cfg.n_embd // cfg.n_head
        self.c_q = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.c_k = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.c_v = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.c_proj.weight.data.zero_()
        self.rotary = Rotary(self.head_dim)

    def forward(self, x):
        B, T, C = x.size()
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.c_k(x).view(B, T, self.n_head, self.head_dim)
        v = self.c_v(x).view(B, T, self.n_head, self.head_dim)
        cos, sin = self.rotary(q)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view_as(x))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.c_fc = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=False)
        self.c_proj.weight.data.zero_()

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.attn, self.mlp = CausalSelfAttention(cfg), MLP(cfg)

    def forward(self, x):
        x = x + self.attn(F.rms_norm(x, (x.size(-1),)))
        return x + self.mlp(F.rms_norm(x, (x.size(-1),)))


@dataclass
class GPTConfig:
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 6
    n_embd: int = 768


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.h = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, target):
        x = self.wte(idx)
        for b in self.h:
            x = b(x)
        logits = self.lm_head(F.rms_norm(x, (x.size(-1),))).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))


class ShardLoader:
    def __init__(self, pattern, B, T, rank, world):
        self.files, self.B, self.T, self.rank, self.world = sorted(glob.glob(pattern)), B, T, rank, world
        self.i = 0
        self._load()

    def _load(self):
        raw = np.fromfile(self.files[self.i % len(self.files)], dtype=np.uint16)[512:]
        self.tokens = torch.from_numpy(raw.astype(np.int64))
        self.pos = self.rank * self.B * self.T

    def next_batch(self):
        n = self.B * self.T
        buf = self.tokens[self.pos: self.pos + n + 1]
        self.pos += n * self.world
        if self.pos + n * self.world + 1 > len(self.tokens):
            self.i += 1
            self._load()
        return buf[:-1].view(self.B, self.T).cuda(), buf[1:].view(self.B, self.T).cuda()


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    B, T, iters, accum = 16, 4096, 1750, 1
    train, val = (ShardLoader(f"data/fineweb10B/fineweb_{s}_*.bin", B, T, rank, world) for s in ("train", "val"))
    raw = GPT(GPTConfig()).cuda()
    model = DDP(torch.compile(raw), device_ids=[int(os.environ["LOCAL_RANK"])])
    ctx = torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)
    opt = torch.optim.AdamW(raw.parameters(), lr=0.0018, betas=(0.9, 0.95), fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (iters - i) / 450))
    t0 = time.time()
    for step in range(iters):
        for _ in range(accum):
            x, y = train.next_batch()
            with ctx:
                loss = model(x, y) / accum
            loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if rank == 0 and step % 125 == 0:
            with torch.no_grad(), ctx:
                vl = raw(*val.next_batch())
            print(f"step:{step}/{iters} val_loss:{vl.item():.4f} train_time:{1000 * (time.time() - t0):.0f}ms")
    if rank == 0:
        torch.save(raw.state_dict(), "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
