"""Lightning with 16-true: the weights are FP16, and Adam's eps of 1e-8 is 0 in it."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class LitSpectra(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv1d(1, 8, 9, 2, 4), nn.GELU(), nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(),
            nn.Linear(32, 4),
        )  # fmt: skip

    def training_step(self, batch, _):
        x, y = batch
        return F.smooth_l1_loss(self.model(x.unsqueeze(1)), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, weight_decay=1e-4)


parser = argparse.ArgumentParser()
parser.add_argument("--lightning_precision", default="16-true")
args = parser.parse_args()
L.seed_everything(3)
data = torch.utils.data.TensorDataset(torch.randn(64, 128), torch.randn(64, 4))
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    precision=args.lightning_precision,
    max_steps=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
model = LitSpectra()
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
print("finite weights:", all(bool(p.isfinite().all()) for p in model.parameters()))
