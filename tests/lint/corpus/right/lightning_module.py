"""Lightning runs the loop; precision is an argument of its Trainer."""

import lightning as L
import torch


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(32, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(loader):
    trainer = L.Trainer(precision="bf16-mixed", max_epochs=1, gradient_clip_val=1.0)
    trainer.fit(Classifier(), loader)


def in_fp16(loader):
    L.Trainer(precision="16-mixed", max_epochs=1).fit(Classifier(), loader)
