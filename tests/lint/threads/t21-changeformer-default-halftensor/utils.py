import os

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class CDDataset(Dataset):
    def __init__(self, root, split, img_size):
        self.root, self.img_size = root, img_size
        with open(os.path.join(root, "list", split + ".txt")) as f:
            self.names = [line.strip() for line in f if line.strip()]

    def __len__(self):
        return len(self.names)

    def _img(self, d, name, resample=Image.BICUBIC, mode="RGB"):
        return np.asarray(Image.open(os.path.join(self.root, d, name)).convert(mode).resize((self.img_size,) * 2, resample))

    def __getitem__(self, i):
        n = self.names[i]
        a, b = (torch.from_numpy(self._img(d, n).astype(np.float16) / 127.5 - 1).permute(2, 0, 1) for d in ("A", "B"))
        label = (self._img("label", n, Image.NEAREST, "L") > 127).astype(np.int64)
        return {"A": a, "B": b, "L": torch.from_numpy(label), "name": n}


def get_loaders(args):
    return {s: DataLoader(CDDataset(args.data_root, s, args.img_size), batch_size=args.batch_size,
                          shuffle=s == "train", num_workers=args.num_workers) for s in ("train", "val")}
