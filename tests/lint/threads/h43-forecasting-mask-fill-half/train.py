import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor
from torch.utils.data import DataLoader, Dataset

from tft import TemporalFusionTransformer


class StockWindows(Dataset):
    def __init__(self, csv, enc_len=120, dec_len=24, part="train"):
        df = pd.read_csv(csv, parse_dates=["date"]).sort_values(["symbol", "date"])
        df["dow"] = df["date"].dt.dayofweek / 6.0
        df["month"] = df["date"].dt.month / 12.0
        self.enc_len, self.dec_len = enc_len, dec_len
        self.items = []
        for _, g in df.groupby("symbol"):
            a = g[["close", "dow", "month", "volume"]].to_numpy(np.float32)
            a[:, [0, 3]] = (a[:, [0, 3]] - a[:, [0, 3]].mean(0)) / (a[:, [0, 3]].std(0) + 1e-6)
            cut = int(len(a) * 0.8)
            a = a[:cut] if part == "train" else a[cut - enc_len:]
            self.items += [(a, s) for s in range(len(a) - enc_len - dec_len)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        a, s = self.items[i]
        e = s + self.enc_len
        length = np.random.randint(self.enc_len // 2, self.enc_len + 1)
        x = {
            "encoder": torch.from_numpy(a[s:e]), "decoder": torch.from_numpy(a[e:e + self.dec_len, 1:]),
            "lengths": torch.tensor(length),
        }
        return x, torch.from_numpy(a[e:e + self.dec_len, 0])


def main():
    pl.seed_everything(42)
    train, val = StockWindows("data/prices.csv"), StockWindows("data/prices.csv", part="val")
    trainer = pl.Trainer(
        max_epochs=30,
        accelerator="gpu",
        devices=1,
        precision=16,
        gradient_clip_val=0.1,
        callbacks=[LearningRateMonitor(), EarlyStopping("val_loss", patience=5)],
    )
    trainer.fit(
        TemporalFusionTransformer(features=4),
        DataLoader(train, 128, shuffle=True, num_workers=4),
        DataLoader(val, 256, num_workers=4),
    )


if __name__ == "__main__":
    main()
