import json

import torch
from torch.utils.data import Dataset


class ERCDataset(Dataset):
    def __init__(self, path):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]["input"], self.rows[i]["target"]


class Seq2SeqCollator:
    def __init__(self, tokenizer, max_length):
        self.tok = tokenizer
        self.max_length = max_length

    def __call__(self, batch):
        ids, labels = [], []
        for src, tgt in batch:
            s = self.tok(src, truncation=True, max_length=self.max_length - 32).input_ids
            t = self.tok(tgt, add_special_tokens=False).input_ids + [self.tok.eos_token_id]
            ids.append(s + t)
            labels.append([-100] * len(s) + t)
        n = max(map(len, ids))
        return {
            "input_ids": torch.tensor([[0] * (n - len(x)) + x for x in ids]),
            "attention_mask": torch.tensor([[0] * (n - len(x)) + [1] * len(x) for x in ids]),
            "labels": torch.tensor([[-100] * (n - len(x)) + x for x in labels]),
        }
