import json
import random

import torch
from torch.utils.data import Dataset


class SegmentDataset(Dataset):
    def __init__(self, files, tokenizer):
        self.tok = tokenizer
        self.rows = [json.loads(l) for f in files for l in open(f)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        a, b = self.rows[i]["a"], self.rows[i]["b"]
        swap = random.random() < 0.5
        return (b, a, 1) if swap else (a, b, 0)

    def collate(self, batch):
        a, b, sop = zip(*batch)
        enc = self.tok(list(a), list(b), padding=True, truncation=True, max_length=512, return_tensors="pt")
        labels = torch.full_like(enc.input_ids, -100)
        m = (torch.rand(enc.input_ids.shape) < 0.15) & (enc.attention_mask == 1)
        labels[m] = enc.input_ids[m]
        enc.input_ids[m] = self.tok.mask_token_id
        return {**enc, "labels": labels, "sentence_order_label": torch.tensor(sop)}
