import json

from torch.utils.data import Dataset


class TextToTextDataset(Dataset):
    def __init__(self, path, tokenizer, max_source, max_target):
        with open(path) as f:
            self.rows = [json.loads(x) for x in f]
        self.tok, self.max_source, self.max_target = tokenizer, max_source, max_target

    def __len__(self):
        return len(self.rows)

    def encode(self, text, n):
        enc = self.tok(text, max_length=n, padding="max_length", truncation=True, return_tensors="pt")
        return enc.input_ids[0], enc.attention_mask[0]

    def __getitem__(self, i):
        r = self.rows[i]
        src, mask = self.encode(r["source"], self.max_source)
        tgt, tmask = self.encode(r["target"], self.max_target)
        return {"source_ids": src, "source_mask": mask, "target_ids": tgt, "target_mask": tmask}
