import argparse
import os

import pandas as pd
import torch
import torch.nn as nn
from accelerate.utils import set_seed
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoTokenizer

from trainer import Trainer


class ReadabilityDataset(Dataset):
    def __init__(self, df, tokenizer, max_len=256):
        self.texts = df["excerpt"].tolist()
        self.targets = df["target"].tolist()
        self.tokenizer = tokenizer
        self.max_len = max_len

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, idx):
        enc = self.tokenizer(
            self.texts[idx], max_length=self.max_len, padding="max_length", truncation=True, return_tensors="pt"
        )
        return {
            "input_ids": enc["input_ids"][0],
            "attention_mask": enc["attention_mask"][0],
            "label": torch.tensor(self.targets[idx], dtype=torch.float),
        }


class ReadabilityModel(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = AutoModel.from_pretrained(backbone)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(self.backbone.config.hidden_size, 1)
        self.criterion = nn.MSELoss()

    def forward(self, input_ids, attention_mask, label=None):
        hidden = self.backbone(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        out = self.head(self.dropout(pooled)).squeeze(-1)
        loss = self.criterion(out, label) if label is not None else None
        return out, loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", default="data/train.csv")
    parser.add_argument("--backbone", default="roberta-base")
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    args = parser.parse_args()
    os.makedirs(args.output_dir, exist_ok=True)
    set_seed(42)

    df = pd.read_csv(args.csv)
    trn, val = train_test_split(df, test_size=0.2, random_state=42)
    tok = AutoTokenizer.from_pretrained(args.backbone)
    train_loader = DataLoader(ReadabilityDataset(trn, tok), batch_size=args.batch_size, shuffle=True, num_workers=2)
    valid_loader = DataLoader(ReadabilityDataset(val, tok), batch_size=args.batch_size * 2, num_workers=2)
    Trainer(args, ReadabilityModel(args.backbone), train_loader, valid_loader).fit()


if __name__ == "__main__":
    main()
