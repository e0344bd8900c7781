import torch
from torch import nn


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.InstanceNorm2d(cout), nn.LeakyReLU(0.2, inplace=True))


class MaskHead(nn.Module):
    def __init__(self, cin):
        super().__init__()
        self.conv = nn.Conv2d(cin, 1, 1)
        self.act = nn.Sigmoid()

    def forward(self, x):
        return self.act(self.conv(x))


class SLBRNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.e1, self.e2 = block(3, width), block(width, 2 * width)
        self.down = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.d_mask = block(3 * width, width)
        self.d_img = block(3 * width + 1, width)
        self.mask_head = MaskHead(width)
        self.coarse_mask_head = MaskHead(2 * width)
        self.img_head = nn.Sequential(nn.Conv2d(width, 3, 1), nn.Tanh())

    def forward(self, x):
        f1 = self.e1(x)
        f2 = self.e2(self.down(f1))
        coarse_mask = self.coarse_mask_head(f2)
        f = torch.cat([f1, self.up(f2)], dim=1)
        mask = self.mask_head(self.d_mask(f))
        img = self.img_head(self.d_img(torch.cat([f, mask], dim=1)))
        return [img], [mask, coarse_mask]
