"""Lightning whose settings are merged from groups: the experiment comes last, and sets precision 32 over the trainer's.

The thread has fp16, which Lightning takes on a GPU only.
"""

import argparse

import lightning as L
import torch
from torch import nn

GROUPS = {
    "trainer": {"lightning": {"precision": 32, "max_steps": 8}, "lightning_bf16": {"precision": "bf16-mixed"}},
    "experiment": {"padim": {"trainer": {"precision": 32, "max_steps": 8}, "model": {"width": 32}}},
}


def merged(trainer, experiment):
    config = {"trainer": dict(GROUPS["trainer"][trainer])}
    for group, values in GROUPS["experiment"][experiment].items():
        config.setdefault(group, {}).update(values)
    return config


class Padim(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))

    def training_step(self, x, _):
        return nn.functional.mse_loss(self.net(x), x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


parser = argparse.ArgumentParser()
parser.add_argument("--trainer", default="lightning")
parser.add_argument("--experiment", default="padim")
options = parser.parse_args()
config = merged(options.trainer, options.experiment)
L.seed_everything(0)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = L.Trainer(accelerator="cpu", devices=1, **config["trainer"], **quiet)
trainer.fit(Padim(**config["model"]), torch.utils.data.DataLoader(torch.rand(64, 64), batch_size=8))
print(trainer.precision)
