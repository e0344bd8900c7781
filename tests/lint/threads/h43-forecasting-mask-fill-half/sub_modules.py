import math

import torch
import torch.nn as nn


class GatedResidual(nn.Module):
    def __init__(self, dim, dropout=0.1):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim * 2)
        self.drop, self.norm = nn.Dropout(dropout), nn.LayerNorm(dim)

    def forward(self, x):
        h = self.drop(self.fc2(nn.functional.elu(self.fc1(x))))
        return self.norm(x + nn.functional.glu(self.gate(h), -1))


class ScaledDotProductAttention(nn.Module):
    def __init__(self, dropout=None, scale=True):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout) if dropout is not None else None
        self.softmax = nn.Softmax(dim=2)
        self.scale = scale

    def forward(self, q, k, v, mask=None):
        attn = torch.bmm(q, k.permute(0, 2, 1))
        if self.scale:
            attn = attn / math.sqrt(k.size(-1))
        if mask is not None:
            attn = attn.masked_fill(mask, -1e9)
        attn = self.softmax(attn)
        if self.dropout is not None:
            attn = self.dropout(attn)
        return torch.bmm(attn, v), attn


class InterpretableMultiHeadAttention(nn.Module):
    def __init__(self, n_head, d_model, dropout=0.0):
        super().__init__()
        self.n_head = n_head
        self.d = d_model // n_head
        self.v = nn.Linear(d_model, self.d)
        self.qs = nn.ModuleList(nn.Linear(d_model, self.d) for _ in range(n_head))
        self.ks = nn.ModuleList(nn.Linear(d_model, self.d) for _ in range(n_head))
        self.attention = ScaledDotProductAttention()
        self.w_h = nn.Linear(self.d, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        heads, attns = [], []
        vs = self.v(v)
        for fq, fk in zip(self.qs, self.ks):
            h, a = self.attention(fq(q), fk(k), vs, mask)
            heads.append(self.dropout(h))
            attns.append(a)
        return self.dropout(self.w_h(torch.stack(heads).mean(0))), torch.stack(attns, 2)
