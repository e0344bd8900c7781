import fsspec
import torch
from torch.utils.data import Dataset


class CharDataset(Dataset):
    def __init__(self, path, block_size, truncate=1.0):
        data = fsspec.open(path).open().read().decode("utf-8")
        data = data[: int(len(data) * truncate)]
        chars = sorted(set(data))
        self.stoi = {c: i for i, c in enumerate(chars)}
        self.block_size, self.vocab_size, self.data = block_size, len(chars), data

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        d = torch.tensor([self.stoi[s] for s in self.data[idx: idx + self.block_size + 1]])
        return d[:-1], d[1:]
