import os

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


class WatermarkPairs(Dataset):
    def __init__(self, root, split, size=256):
        self.root = os.path.join(root, split)
        self.names = sorted(os.listdir(os.path.join(self.root, "image")))
        self.size = size

    def __len__(self):
        return len(self.names)

    def _load(self, kind, name, mode):
        img = Image.open(os.path.join(self.root, kind, name)).convert(mode)
        arr = np.asarray(img.resize((self.size, self.size)), dtype=np.float32) / 255.0
        if arr.ndim == 2:
            arr = arr[..., None]
        return torch.from_numpy(arr).permute(2, 0, 1)

    def __getitem__(self, i):
        n = self.names[i]
        mask = (self._load("mask", n, "L") > 0.5).float()
        return {"image": self._load("image", n, "RGB"), "target": self._load("target", n, "RGB"), "mask": mask}
