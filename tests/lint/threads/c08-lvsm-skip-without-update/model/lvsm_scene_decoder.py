import torch
import torch.nn as nn
import torch.nn.functional as F
from easydict import EasyDict as edict


class LVSM(nn.Module):
    def __init__(self, config):
        super().__init__()
        m = config.model
        self.p = m.patch_size
        self.tok_in = nn.Linear(9 * self.p ** 2, m.d, bias=False)
        self.tok_tgt = nn.Linear(6 * self.p ** 2, m.d, bias=False)
        layer = nn.TransformerEncoderLayer(m.d, m.heads, 4 * m.d, dropout=0.0, batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, m.layers)
        self.out = nn.Sequential(nn.LayerNorm(m.d), nn.Linear(m.d, 3 * self.p ** 2, bias=False), nn.Sigmoid())

    def patch(self, x):
        b, v, c, h, w = x.shape
        x = F.unfold(x.flatten(0, 1), self.p, stride=self.p).transpose(1, 2)
        return x.reshape(b, -1, x.shape[-1])

    def forward(self, batch):
        src = self.tok_in(self.patch(torch.cat([batch["image"] * 2 - 1, batch["ray"]], 2)))
        tgt = self.tok_tgt(self.patch(batch["target_ray"]))
        y = self.out(self.trunk(torch.cat([src, tgt], 1))[:, src.shape[1]:])
        gt = self.patch(batch["target_image"])
        l2 = F.mse_loss(y, gt)
        return edict(loss=l2, l2_loss=l2, psnr=-10 * torch.log10(l2))
