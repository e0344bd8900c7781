from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass
class SAEConfig:
    d_in: int = 768
    d_sae: int = 24576
    k: int = 64
    dtype: str = "float32"
    device: str = "cuda"


class TopKSAE(nn.Module):
    def __init__(self, cfg: SAEConfig):
        super().__init__()
        self.cfg = cfg
        dt = getattr(torch, cfg.dtype)
        w = torch.randn(cfg.d_sae, cfg.d_in, device=cfg.device, dtype=dt)
        self.W_dec = nn.Parameter(w / w.norm(dim=-1, keepdim=True))
        self.W_enc = nn.Parameter(self.W_dec.detach().T.clone())
        self.b_enc = nn.Parameter(torch.zeros(cfg.d_sae, device=cfg.device, dtype=dt))
        self.b_dec = nn.Parameter(torch.zeros(cfg.d_in, device=cfg.device, dtype=dt))

    def encode(self, x):
        pre = (x - self.b_dec) @ self.W_enc + self.b_enc
        val, idx = pre.topk(self.cfg.k, dim=-1)
        return torch.zeros_like(pre).scatter(-1, idx, val.relu())

    def forward(self, x):
        return self.encode(x) @ self.W_dec + self.b_dec
