import glob
import random

import torch
import torchaudio
from torch.utils.data import DataLoader, Dataset


class SampleDataset(Dataset):
    def __init__(self, root, sample_size, sr):
        self.files, self.n, self.sr = glob.glob(f"{root}/**/*.wav", recursive=True), sample_size, sr

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        x, sr = torchaudio.load(self.files[i])
        x = torchaudio.functional.resample(x, sr, self.sr)
        x = torch.nn.functional.pad(x, (0, max(0, self.n - x.shape[-1])))
        s = random.randint(0, x.shape[-1] - self.n)
        return (x[:, s: s + self.n].expand(2, -1).clone(),)


def create_dataloader_from_config(cfg, batch_size, num_workers, sample_size):
    ds = SampleDataset(cfg["path"], sample_size, cfg["sample_rate"])
    return DataLoader(ds, batch_size, shuffle=True, num_workers=num_workers, drop_last=True)
