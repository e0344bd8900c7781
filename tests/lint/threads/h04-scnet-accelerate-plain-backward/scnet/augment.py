import random

import torch
from torch import nn


class Shift(nn.Module):
    def __init__(self, shift=8192):
        super().__init__()
        self.shift = shift

    def forward(self, wav):
        batch, sources, channels, time = wav.size()
        length = time - self.shift
        if self.shift > 0 and self.training:
            offset = random.randint(0, self.shift)
            wav = wav[..., offset:offset + length]
        return wav


class FlipChannels(nn.Module):
    def forward(self, wav):
        if self.training and random.random() < 0.5:
            wav = wav.flip(2)
        return wav


class FlipSign(nn.Module):
    def forward(self, wav):
        if self.training:
            signs = torch.randint(2, (wav.size(0), wav.size(1), 1, 1), device=wav.device, dtype=torch.float32)
            wav = wav * (2 * signs - 1)
        return wav
