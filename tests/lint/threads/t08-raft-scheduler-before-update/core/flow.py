import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import autocast


class Encoder(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.InstanceNorm2d(64), nn.ReLU(inplace=True),
                                 nn.Conv2d(64, 96, 3, 2, 1), nn.InstanceNorm2d(96), nn.ReLU(inplace=True),
                                 nn.Conv2d(96, out, 3, 2, 1))

    def forward(self, x):
        return self.net(x)


class FlowNet(nn.Module):
    def __init__(self, args, dim=128):
        super().__init__()
        self.args = args
        self.fnet, self.cnet = Encoder(dim), Encoder(dim)
        self.update = nn.Sequential(nn.Conv2d(3 * dim + 2, dim, 3, 1, 1), nn.ReLU(inplace=True),
                                    nn.Conv2d(dim, dim, 3, 1, 1), nn.ReLU(inplace=True), nn.Conv2d(dim, 2, 3, 1, 1))

    def warp(self, f, flow):
        b, _, h, w = f.shape
        ys, xs = torch.meshgrid(torch.arange(h, device=f.device), torch.arange(w, device=f.device), indexing="ij")
        x = 2 * (xs + flow[:, 0]) / (w - 1) - 1
        y = 2 * (ys + flow[:, 1]) / (h - 1) - 1
        return F.grid_sample(f, torch.stack([x, y], dim=-1), align_corners=True)

    def forward(self, image1, image2, iters=12):
        image1, image2 = 2 * (image1 / 255.0) - 1.0, 2 * (image2 / 255.0) - 1.0
        with autocast(enabled=self.args.mixed_precision):
            fmap1, fmap2, ctx = self.fnet(image1), self.fnet(image2), self.cnet(image1)
        fmap1, fmap2, ctx = fmap1.float(), fmap2.float(), ctx.float()
        flow = fmap1.new_zeros(fmap1.shape[0], 2, *fmap1.shape[2:])
        preds = []
        for _ in range(iters):
            flow = flow.detach()
            warped = self.warp(fmap2, flow)
            with autocast(enabled=self.args.mixed_precision):
                delta = self.update(torch.cat([ctx, fmap1, warped, flow], dim=1))
            flow = flow + delta.float()
            preds.append(8 * F.interpolate(flow, scale_factor=8, mode="bilinear", align_corners=True))
        return preds
