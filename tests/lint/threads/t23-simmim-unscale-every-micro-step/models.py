import torch
from torch import nn


class SimMIM(nn.Module):
    def __init__(self, dim, depth, heads, patch, img_size):
        super().__init__()
        self.patch = patch
        n = (img_size // patch) ** 2
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, n, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.decoder = nn.Sequential(nn.Conv2d(dim, patch * patch * 3, 1), nn.PixelShuffle(patch))

    def forward(self, x, mask):
        t = self.embed(x).flatten(2).transpose(1, 2)
        w = mask.flatten(1).unsqueeze(-1).type_as(t)
        t = t * (1 - w) + self.mask_token * w
        z = self.encoder(t + self.pos).transpose(1, 2)
        h = int(z.shape[-1] ** 0.5)
        rec = self.decoder(z.reshape(z.shape[0], -1, h, h))
        m = mask.repeat_interleave(self.patch, 1).repeat_interleave(self.patch, 2).unsqueeze(1)
        loss = (rec.float() - x).abs() * m
        return loss.sum() / (m.sum() + 1e-5) / 3
