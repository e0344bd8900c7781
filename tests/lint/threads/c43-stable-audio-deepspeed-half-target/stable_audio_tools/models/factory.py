import torch
import torch.nn as nn


class FourierFeatures(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out // 2, 1))

    def forward(self, x):
        f = 2 * torch.pi * x[:, None] @ self.weight.T
        return torch.cat([f.cos(), f.sin()], -1)


class ResBlock(nn.Module):
    def __init__(self, c, temb):
        super().__init__()
        self.net = nn.Sequential(nn.GroupNorm(8, c), nn.GELU(), nn.Conv1d(c, c, 5, padding=2), nn.GroupNorm(8, c),
                                 nn.GELU(), nn.Conv1d(c, c, 5, padding=2))
        self.t = nn.Linear(temb, c)

    def forward(self, x, e):
        return x + self.net(x + self.t(e)[..., None])


class DiffusionUNet1D(nn.Module):
    def __init__(self, io_channels=2, channels=(128, 256, 512), depth=3):
        super().__init__()
        self.temb = FourierFeatures(128)
        self.inp = nn.Conv1d(io_channels, channels[0], 1)
        self.blocks = nn.ModuleList(nn.ModuleList(ResBlock(c, 128) for _ in range(depth)) for c in channels)
        self.down = nn.ModuleList(nn.Conv1d(a, b, 4, 2, 1) for a, b in zip(channels, channels[1:]))
        self.up = nn.ModuleList(nn.ConvTranspose1d(b, a, 4, 2, 1) for a, b in zip(channels, channels[1:]))
        self.out = nn.Conv1d(channels[0], io_channels, 1)

    @property
    def dtype(self):
        return self.inp.weight.dtype

    def forward(self, x, t):
        e, skips = self.temb(t), []
        x = self.inp(x)
        for i, bs in enumerate(self.blocks):
            for b in bs:
                x = b(x, e)
            if i < len(self.down):
                skips.append(x)
                x = self.down[i](x)
        for u, s in zip(reversed(self.up), reversed(skips)):
            x = u(x) + s
        return self.out(x)


def create_model_from_config(cfg):
    return DiffusionUNet1D(**cfg["model"])
