import json

import torch
from torch.utils.data import Dataset


class PromptDataset(Dataset):
    def __init__(self, path, tokenizer, max_len):
        self.rows = [json.loads(l) for l in open(path)]
        self.tok, self.max_len = tokenizer, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows[i]
        enc = self.tok(r["prompt"] + r["answer"] + self.tok.eos_token, truncation=True, max_length=self.max_len,
                       padding="max_length", return_tensors="pt")
        ids, mask = enc.input_ids[0], enc.attention_mask[0]
        labels = ids.masked_fill(mask == 0, -100)
        n = len(self.tok(r["prompt"]).input_ids)
        labels[:n] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
