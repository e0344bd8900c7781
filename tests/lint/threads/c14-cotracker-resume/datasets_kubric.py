import os

import numpy as np
import torch
from torch.utils.data import Dataset


class KubricMovifDataset(Dataset):
    def __init__(self, root, crop_size, seq_len, traj_per_sample):
        self.root, self.names = root, sorted(os.listdir(root))
        self.crop, self.T, self.n = crop_size, seq_len, traj_per_sample

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        d = np.load(os.path.join(self.root, self.names[i]))
        keep = np.random.permutation(d["tracks"].shape[1])[: self.n]
        ok = len(keep) == self.n
        h, w = self.crop
        return {"video": torch.from_numpy(d["frames"][: self.T, :h, :w]).permute(0, 3, 1, 2).float(),
                "trajectory": torch.from_numpy(d["tracks"][: self.T, keep]).float(),
                "visibility": torch.from_numpy(d["visible"][: self.T, keep])}, ok


def collate_fn_train(batch):
    data, ok = zip(*batch)
    return {k: torch.stack([d[k] for d in data]) for k in data[0]}, ok
