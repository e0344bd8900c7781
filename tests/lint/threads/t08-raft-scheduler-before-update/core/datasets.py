import glob
import os

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


def read_flo(path):
    with open(path, "rb") as f:
        assert np.fromfile(f, np.float32, count=1)[0] == 202021.25
        w, h = np.fromfile(f, np.int32, count=2)
        return np.fromfile(f, np.float32, count=2 * w * h).reshape(h, w, 2)


class FlyingChairs(Dataset):
    def __init__(self, root, size):
        self.images = sorted(glob.glob(os.path.join(root, "*.ppm")))
        self.flows = sorted(glob.glob(os.path.join(root, "*.flo")))
        self.size = size

    def __len__(self):
        return len(self.flows)

    def __getitem__(self, i):
        im1, im2 = (np.array(Image.open(self.images[2 * i + k])).astype(np.float32) for k in (0, 1))
        flow = read_flo(self.flows[i])
        h, w = self.size
        y, x = np.random.randint(0, flow.shape[0] - h + 1), np.random.randint(0, flow.shape[1] - w + 1)
        im1, im2, flow = (torch.from_numpy(a[y:y + h, x:x + w]).permute(2, 0, 1) for a in (im1, im2, flow))
        return im1, im2, flow, ((flow[0].abs() < 1000) & (flow[1].abs() < 1000)).float()


def fetch_dataloader(args):
    return DataLoader(FlyingChairs(args.data_root, args.image_size), batch_size=args.batch_size, shuffle=True,
                      num_workers=4, drop_last=True, pin_memory=True)
