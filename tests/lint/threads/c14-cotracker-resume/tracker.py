import torch
import torch.nn as nn
import torch.nn.functional as F


class TrackerNet(nn.Module):
    def __init__(self, stride=4, dim=128, hidden=384):
        super().__init__()
        self.stride = stride
        self.fnet = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.InstanceNorm2d(64), nn.ReLU(),
                                  nn.Conv2d(64, dim, 3, 2, 1))
        layer = nn.TransformerEncoderLayer(hidden, 6, 1024, batch_first=True)
        self.inp = nn.Linear(2 * dim + 2, hidden)
        self.updateformer = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(hidden, 2)
        self.vis = nn.Linear(hidden, 1)

    def sample(self, f, xy):
        h, w = f.shape[-2:]
        g = torch.stack([xy[..., 0] / (w - 1), xy[..., 1] / (h - 1)], -1) * 2 - 1
        return F.grid_sample(f, g[:, :, None], align_corners=True)[..., 0].transpose(1, 2)

    def forward(self, video, queries, iters=4):
        B, T, C, H, W = video.shape
        f = self.fnet((2 * (video / 255.0) - 1).flatten(0, 1))
        n = queries.shape[1]
        coords = (queries[:, None, :, 1:] / self.stride).expand(B, T, n, 2)
        q = self.sample(f.view(B, T, *f.shape[1:])[:, 0], coords[:, 0])
        preds = []
        for _ in range(iters):
            coords = coords.detach()
            s = self.sample(f, coords.flatten(0, 1)).view(B, T, n, -1)
            x = torch.cat([s, q[:, None].expand_as(s), coords - coords[:, :1]], -1)
            x = self.updateformer(self.inp(x.permute(0, 2, 1, 3).flatten(0, 1)))
            coords = coords + self.head(x).view(B, n, T, 2).permute(0, 2, 1, 3)
            preds.append(coords * self.stride)
        return preds, self.vis(x).view(B, n, T).permute(0, 2, 1)
