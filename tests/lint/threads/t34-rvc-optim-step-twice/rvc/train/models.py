import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class Generator(nn.Module):
    def __init__(self, cin=768, ch=512, rates=(10, 10, 2, 2)):
        super().__init__()
        self.pre = weight_norm(nn.Conv1d(cin, ch, 7, padding=3))
        self.ups, self.res = nn.ModuleList(), nn.ModuleList()
        for r in rates:
            self.ups.append(weight_norm(nn.ConvTranspose1d(ch, ch // 2, 2 * r, r, r // 2 + r % 2, output_padding=r % 2)))
            ch //= 2
            self.res.append(nn.ModuleList(weight_norm(nn.Conv1d(ch, ch, 3, padding=d, dilation=d)) for d in (1, 3, 5)))
        self.post = weight_norm(nn.Conv1d(ch, 1, 7, padding=3))

    def forward(self, x):
        x = self.pre(x)
        for up, res in zip(self.ups, self.res):
            x = up(F.leaky_relu(x, 0.1))
            for r in res:
                x = x + r(F.leaky_relu(x, 0.1))
        return torch.tanh(self.post(F.leaky_relu(x)))


class PeriodD(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.period = period
        chans = [1, 32, 128, 512]
        self.convs = nn.ModuleList(weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0))) for a, b in zip(chans, chans[1:]))
        self.post = weight_norm(nn.Conv2d(512, 1, (3, 1), 1, (1, 0)))

    def forward(self, x):
        x = F.pad(x, (0, -x.shape[-1] % self.period), "reflect")
        x = x.view(x.shape[0], 1, -1, self.period)
        fmap = []
        for c in self.convs:
            x = F.leaky_relu(c(x), 0.1)
            fmap.append(x)
        return self.post(x).flatten(1), fmap


class MultiPeriodDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.ds = nn.ModuleList(PeriodD(p) for p in (2, 3, 5, 7, 11, 17))

    def forward(self, y, y_hat):
        r, g = [d(y) for d in self.ds], [d(y_hat) for d in self.ds]
        return [o for o, _ in r], [o for o, _ in g], [f for _, f in r], [f for _, f in g]
