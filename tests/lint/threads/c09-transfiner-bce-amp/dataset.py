import os

import torch
from torch.utils.data import Dataset


class RoIMasks(Dataset):
    def __init__(self, root):
        self.files = [os.path.join(root, f) for f in sorted(os.listdir(root))]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i])
        m = d["mask"].float()
        er = -torch.nn.functional.max_pool2d(-m[None], 3, 1, 1)[0]
        di = torch.nn.functional.max_pool2d(m[None], 3, 1, 1)[0]
        return d["feat"].float(), m, (di - er)
