import lightning.pytorch as pl
import pandas as pd
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer


class Summaries(Dataset):
    def __init__(self, path):
        self.df = pd.read_parquet(path)

    def __len__(self):
        return len(self.df)

    def __getitem__(self, i):
        r = self.df.iloc[i]
        return "summarize: " + r["text"], r["summary"]


class SummaryData(pl.LightningDataModule):
    def __init__(self, train, val, model_name, batch_size=2, max_in=1024, max_out=256):
        super().__init__()
        self.train, self.val, self.bs = train, val, batch_size
        self.tok = AutoTokenizer.from_pretrained(model_name)
        self.max_in, self.max_out = max_in, max_out

    def collate(self, b):
        x, y = zip(*b)
        enc = self.tok(list(x), padding=True, truncation=True, max_length=self.max_in, return_tensors="pt")
        lab = self.tok(text_target=list(y), padding=True, truncation=True, max_length=self.max_out,
                       return_tensors="pt").input_ids
        lab[lab == self.tok.pad_token_id] = -100
        return {"input_ids": enc.input_ids, "attention_mask": enc.attention_mask, "labels": lab}

    def train_dataloader(self):
        return DataLoader(Summaries(self.train), self.bs, shuffle=True, collate_fn=self.collate, num_workers=4)

    def val_dataloader(self):
        return DataLoader(Summaries(self.val), self.bs, collate_fn=self.collate, num_workers=4)
