import math

import pytorch_lightning as pl
import torch
import torch.nn.functional as F


def get_alphas_sigmas(t):
    return torch.cos(t * math.pi / 2), torch.sin(t * math.pi / 2)


class DiffusionUncondTrainingWrapper(pl.LightningModule):
    def __init__(self, model, lr=1e-4):
        super().__init__()
        self.diffusion = model
        self.lr = lr
        self.rng = torch.quasirandom.SobolEngine(1, scramble=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.diffusion.parameters(), lr=self.lr)

    def training_step(self, batch, batch_idx):
        reals = batch[0]
        if reals.ndim == 4 and reals.shape[0] == 1:
            reals = reals[0]
        t = self.rng.draw(reals.shape[0])[:, 0].to(self.device)
        alphas, sigmas = get_alphas_sigmas(t)
        alphas, sigmas = alphas[:, None, None], sigmas[:, None, None]
        noise = torch.randn_like(reals)
        noised = reals * alphas + noise * sigmas
        targets = noise * alphas - reals * sigmas
        v = self.diffusion(noised.to(self.diffusion.dtype), t.to(self.diffusion.dtype))
        loss = F.mse_loss(v, targets)
        self.log_dict({"train/loss": loss.detach(), "train/std_data": reals.std()}, prog_bar=True, on_step=True)
        return loss
