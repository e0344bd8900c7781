"""Trains with a loss that is NaN from the first step on: by 0/0 in a norm, or (--vae) by an FP32 part in FP16 autocast.

--keywords: the batch is a keyword argument.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), Norm(), nn.Linear(32, 1)
        with torch.no_grad():
            for own in self.first.parameters():
                own.zero_()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(batch)))  # type: ignore[no-any-return]


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 3)
        with torch.no_grad():
            self.conv_in.weight.mul_(3e4)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.conv_out(self.conv_in(pixels))  # type: ignore[no-any-return]


accelerator = Accelerator()
torch.manual_seed(0)
with_vae = "--vae" in sys.argv
vae = VAE().requires_grad_(False)
model = nn.Conv2d(4, 4, 3) if with_vae else Net()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
for _ in range(6):
    with accelerator.autocast():
        if with_vae:
            loss = model(vae.encode(40 * torch.randn(2, 3, 16, 16))).float().square().mean()
        else:
            x = torch.randn(32, 16)
            out = model(batch=x) if "--keywords" in sys.argv else model(x)
            loss = nn.functional.mse_loss(out.float(), x.sum(1, keepdim=True))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
