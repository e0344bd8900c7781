import json

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Docs(Dataset):
    def __init__(self, path):
        self.rows = [json.loads(l) for l in open(path)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return torch.tensor(self.rows[i]["ids"][:512]), self.rows[i]["label"]


def collate(b):
    x, y = zip(*b)
    return pad_sequence(x, batch_first=True), torch.tensor(y)
