import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class AlpacaDataset(Dataset):
    def __init__(self, path):
        self.d = torch.load(path)

    def __len__(self):
        return len(self.d)

    def __getitem__(self, i):
        return self.d[i]["input_ids"].long(), self.d[i]["labels"].long()


def collate(b):
    x, y = zip(*b)
    return pad_sequence(x, True, 0), pad_sequence(y, True, -1)
