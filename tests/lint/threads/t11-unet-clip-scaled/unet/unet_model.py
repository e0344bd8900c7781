import torch
import torch.nn as nn


class DoubleConv(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
                         nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes, widths=(64, 128, 256, 512)):
        super().__init__()
        self.n_channels, self.n_classes = n_channels, n_classes
        self.downs = nn.ModuleList()
        c = n_channels
        for w in widths:
            self.downs.append(DoubleConv(c, w))
            c = w
        self.pool = nn.MaxPool2d(2)
        self.ups, self.convs = nn.ModuleList(), nn.ModuleList()
        for w in reversed(widths[:-1]):
            self.ups.append(nn.ConvTranspose2d(c, w, 2, stride=2))
            self.convs.append(DoubleConv(2 * w, w))
            c = w
        self.outc = nn.Conv2d(c, n_classes, 1)

    def forward(self, x):
        skips = []
        for i, d in enumerate(self.downs):
            x = d(x if i == 0 else self.pool(x))
            skips.append(x)
        for up, conv, s in zip(self.ups, self.convs, reversed(skips[:-1])):
            x = conv(torch.cat([s, up(x)], dim=1))
        return self.outc(x)
