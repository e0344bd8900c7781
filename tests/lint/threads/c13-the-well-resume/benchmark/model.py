import torch
import torch.nn as nn


class UNetClassic(nn.Module):
    def __init__(self, c_in, c_out, width=48):
        super().__init__()
        def block(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.Tanh(),
                                 nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.Tanh())
        self.d1, self.d2, self.mid = block(c_in, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.u2, self.u1 = block(6 * width, 2 * width), block(3 * width, width)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.out = nn.Conv2d(width, c_out, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        c = self.mid(self.pool(b))
        y = self.u2(torch.cat([self.up(c), b], 1))
        return self.out(self.u1(torch.cat([self.up(y), a], 1)))
