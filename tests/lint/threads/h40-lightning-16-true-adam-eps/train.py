import argparse

import lightning as L
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, random_split


class SpectraDataset(Dataset):
    def __init__(self, path):
        z = np.load(path)
        self.x = torch.from_numpy(z["spectra"]).float()
        self.y = torch.from_numpy(z["target"]).float()
        self.x = (self.x - self.x.mean(0)) / (self.x.std(0) + 1e-6)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class ConvRegressor(nn.Module):
    def __init__(self, outputs=4, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, width, 9, 2, 4), nn.GELU(),
            nn.Conv1d(width, width * 2, 9, 2, 4), nn.GELU(),
            nn.Conv1d(width * 2, width * 4, 9, 2, 4), nn.GELU(),
            nn.AdaptiveAvgPool1d(8), nn.Flatten(),
            nn.Linear(width * 32, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, outputs),
        )

    def forward(self, x):
        return self.net(x.unsqueeze(1))


class LitSpectra(L.LightningModule):
    def __init__(self, lr=1e-3, weight_decay=1e-4, pretrained=None):
        super().__init__()
        self.save_hyperparameters()
        self.model = ConvRegressor()
        if pretrained:
            self.model.load_state_dict(torch.load(pretrained, map_location="cpu"))

    def forward(self, x):
        return self.model(x)

    def step(self, batch, stage):
        x, y = batch
        loss = F.smooth_l1_loss(self(x), y)
        self.log(f"{stage}_loss", loss, prog_bar=True, on_epoch=True, on_step=stage == "train")
        return loss

    def training_step(self, batch, _):
        return self.step(batch, "train")

    def validation_step(self, batch, _):
        self.step(batch, "val")

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.trainer.max_epochs)
        return [opt], [sched]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="data/spectra.npz")
    p.add_argument("--lightning_precision", default="16-true")
    p.add_argument("--epochs", type=int, default=50)
    p.add_argument("--batch_size", type=int, default=256)
    p.add_argument("--pretrained", default=None)
    args = p.parse_args()

    L.seed_everything(3)
    full = SpectraDataset(args.data)
    n_val = len(full) // 10
    train, val = random_split(full, [len(full) - n_val, n_val])
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        precision=args.lightning_precision,
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(monitor="val_loss"), LearningRateMonitor()],
    )
    trainer.fit(
        LitSpectra(pretrained=args.pretrained),
        DataLoader(train, args.batch_size, shuffle=True, num_workers=4),
        DataLoader(val, args.batch_size, num_workers=4),
    )


if __name__ == "__main__":
    main()
