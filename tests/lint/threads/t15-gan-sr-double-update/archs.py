from torch import nn
from torch.nn.utils import spectral_norm


class Compact(nn.Module):
    def __init__(self, scale=4, feat=64, convs=16):
        super().__init__()
        body = [nn.Conv2d(3, feat, 3, 1, 1), nn.PReLU(feat)]
        for _ in range(convs):
            body += [nn.Conv2d(feat, feat, 3, 1, 1), nn.PReLU(feat)]
        body += [nn.Conv2d(feat, 3 * scale * scale, 3, 1, 1)]
        self.body, self.up = nn.Sequential(*body), nn.PixelShuffle(scale)
        self.base = nn.Upsample(scale_factor=scale, mode="nearest")

    def forward(self, x):
        return self.up(self.body(x)) + self.base(x)


class PatchD(nn.Module):
    def __init__(self, feat=64):
        super().__init__()
        layers, c = [nn.Conv2d(3, feat, 3, 1, 1), nn.LeakyReLU(0.2)], feat
        for _ in range(3):
            layers += [spectral_norm(nn.Conv2d(c, 2 * c, 4, 2, 1, bias=False)), nn.LeakyReLU(0.2)]
            c *= 2
        self.net = nn.Sequential(*layers, nn.Conv2d(c, 1, 3, 1, 1))

    def forward(self, x):
        return self.net(x)
