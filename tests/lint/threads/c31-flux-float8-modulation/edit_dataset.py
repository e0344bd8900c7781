import json
import os

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms.functional import normalize, resize, to_tensor


class EditPairs(Dataset):
    def __init__(self, root, size=1024):
        self.root, self.size = root, size
        self.rows = [json.loads(l) for l in open(os.path.join(root, "meta.jsonl"))]

    def __len__(self):
        return len(self.rows)

    def _img(self, name):
        im = Image.open(os.path.join(self.root, name)).convert("RGB")
        return normalize(to_tensor(resize(im, (self.size, self.size))), [0.5] * 3, [0.5] * 3)

    def __getitem__(self, i):
        r = self.rows[i]
        return self._img(r["source"]), self._img(r["target"]), r["prompt"]


def collate(b):
    s, t, p = zip(*b)
    return torch.stack(s), torch.stack(t), list(p)
