"""Lightning with precision 32: importing the module of the model turns TF32 on for the whole process."""

import lightning as L
import tensornet
import torch
from torch import nn


class LNNP(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tensornet.TensorNet()

    def training_step(self, batch, _):
        pos, energy, force = batch
        with torch.enable_grad():
            pos.requires_grad_(True)
            y = self.model(pos)
            f = -torch.autograd.grad(y.sum(), pos, create_graph=True)[0]
        return 0.05 * nn.functional.mse_loss(y, energy) + 0.95 * nn.functional.mse_loss(f, force)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


L.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8, 3), torch.randn(64), torch.randn(64, 8, 3))
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    precision=32,
    max_steps=8,
    gradient_clip_val=40,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(LNNP(), torch.utils.data.DataLoader(data, batch_size=8))
print(torch.get_float32_matmul_precision())
