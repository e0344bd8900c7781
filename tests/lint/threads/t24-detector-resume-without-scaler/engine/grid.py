import json
import os

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Dataset


class GridDetector(nn.Module):
    def __init__(self, nc=80, w=32):
        super().__init__()
        layers, c = [], 3
        for i in range(5):
            layers += [nn.Conv2d(c, w * 2 ** min(i, 3), 3, 2, 1, bias=False), nn.BatchNorm2d(w * 2 ** min(i, 3)), nn.SiLU()]
            c = w * 2 ** min(i, 3)
        self.backbone, self.head = nn.Sequential(*layers), nn.Conv2d(c, 5 + nc, 1)

    def forward(self, x):
        return self.head(self.backbone(x))


def criterion(pred, target):
    pred = pred.float()
    obj = target[:, :1]
    l_obj = F.binary_cross_entropy_with_logits(pred[:, :1], obj)
    l_box = ((pred[:, 1:5].sigmoid() - target[:, 1:5]).abs() * obj).sum() / obj.sum().clamp(min=1)
    l_cls = (F.binary_cross_entropy_with_logits(pred[:, 5:], target[:, 5:], reduction="none") * obj).sum() / obj.sum().clamp(min=1)
    return l_obj + 5 * l_box + l_cls


class GridData(Dataset):
    def __init__(self, root, split, nc=80, size=640, stride=32):
        with open(os.path.join(root, f"{split}.json")) as f:
            self.items = json.load(f)
        self.root, self.nc, self.size, self.s = root, nc, size, size // stride

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        it = self.items[i]
        img = Image.open(os.path.join(self.root, it["file"])).convert("RGB").resize((self.size, self.size))
        t = torch.zeros(5 + self.nc, self.s, self.s)
        for c, x, y, w, h in it["boxes"]:
            gx, gy = int(x * self.s), int(y * self.s)
            t[0, gy, gx], t[1:5, gy, gx], t[5 + c, gy, gx] = 1, torch.tensor([x * self.s - gx, y * self.s - gy, w, h]), 1
        return torch.from_numpy(np.asarray(img).copy()).permute(2, 0, 1).float() / 255, t
