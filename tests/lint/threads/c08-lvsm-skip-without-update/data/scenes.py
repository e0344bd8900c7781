import os

import torch
from torch.utils.data import Dataset


class SceneDataset(Dataset):
    def __init__(self, config):
        root = config.training.dataset_path
        self.files = sorted(os.path.join(root, f) for f in os.listdir(root))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        s = torch.load(self.files[i])
        idx = torch.randperm(len(s["image"]))[:3]
        img, ray = s["image"][idx].float() / 255, s["ray"][idx].float()
        return {"image": img[:2], "ray": ray[:2], "target_image": img[2:], "target_ray": ray[2:]}
