import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from megatron.positional_embeddings import RotaryEmbedding, apply_rotary_pos_emb


class ParallelTransformerLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        h, self.n = cfg["hidden_size"], cfg["num_attention_heads"]
        self.hd = h // self.n
        self.rotary_ndims = int(self.hd * cfg["rotary_pct"])
        dtype = torch.bfloat16 if cfg.get("bf16", {}).get("enabled") else torch.half
        self.rotary_emb = RotaryEmbedding(self.rotary_ndims, precision=dtype)
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.dense = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h))

    def forward(self, x):
        s, b, h = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(s, b, self.n, 3 * self.hd).chunk(3, dim=-1)
        r = self.rotary_ndims
        cos, sin = self.rotary_emb(v, seq_dim=0)
        q_r, k_r = apply_rotary_pos_emb(q[..., :r], k[..., :r], cos, sin)
        q, k = torch.cat((q_r, q[..., r:]), -1), torch.cat((k_r, k[..., r:]), -1)
        y = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True)
        x = x + self.dense(y.permute(2, 0, 1, 3).reshape(s, b, h))
        return x + self.mlp(self.ln2(x))


class GPTNeoX(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.emb = nn.Embedding(cfg["vocab_size"], cfg["hidden_size"])
        self.layers = nn.ModuleList(ParallelTransformerLayer(cfg) for _ in range(cfg["num_layers"]))
        self.norm = nn.LayerNorm(cfg["hidden_size"])
        self.out = nn.Linear(cfg["hidden_size"], cfg["vocab_size"], bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=math.sqrt(2 / (5 * cfg["hidden_size"])))

    def forward(self, tokens, labels):
        x = self.emb(tokens).transpose(0, 1)
        for l in self.layers:
            x = l(x)
        logits = self.out(self.norm(x)).transpose(0, 1)
        return F.cross_entropy(logits.float().reshape(-1, logits.size(-1)), labels.reshape(-1))
