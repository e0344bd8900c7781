import json

import torch
from torch.utils.data import Dataset


class PackedTextDataset(Dataset):
    def __init__(self, path, tokenizer, seq_length):
        ids = []
        with open(path) as f:
            for line in f:
                ids += tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id]
        n = len(ids) // seq_length
        self.data = torch.tensor(ids[: n * seq_length]).view(n, seq_length)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]
