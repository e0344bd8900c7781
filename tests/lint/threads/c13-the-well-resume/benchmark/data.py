import h5py
import torch
from torch.utils.data import DataLoader, Dataset


class FieldWindows(Dataset):
    def __init__(self, path, n_in=4):
        self.f = h5py.File(path, "r")["fields"]
        self.n_in = n_in

    def __len__(self):
        return self.f.shape[0] * (self.f.shape[1] - self.n_in)

    def __getitem__(self, i):
        per = self.f.shape[1] - self.n_in
        traj, t = divmod(i, per)
        x = torch.from_numpy(self.f[traj, t: t + self.n_in + 1])
        return {"input_fields": x[:-1].flatten(0, 1), "output_fields": x[-1]}


class DataModule:
    def __init__(self, root, batch_size):
        self.root, self.batch_size = root, batch_size

    def train_dataloader(self):
        return DataLoader(FieldWindows(f"{self.root}/train.h5"), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(FieldWindows(f"{self.root}/valid.h5"), self.batch_size)
