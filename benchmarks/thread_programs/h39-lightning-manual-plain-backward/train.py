"""Lightning with 16-mixed and manual optimization: `loss.backward()` in place of `self.manual_backward(loss)`."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn


class VAEGAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.decoder = nn.Linear(64, 16), nn.Sequential(nn.Linear(8, 64), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def configure_optimizers(self):
        parts = (self.encoder, self.decoder, self.critic)
        return [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in parts]

    def encode(self, x):
        mu, logvar = self.encoder(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return z, -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())

    def training_step(self, x, batch_idx):
        opt_e, opt_d, opt_c = self.optimizers()

        z, _ = self.encode(x)
        fake = self.decoder(z).detach()
        c_loss = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake)).mean()
        opt_c.zero_grad()
        c_loss.backward()
        opt_c.step()

        z, kl = self.encode(x)
        rec = self.decoder(z)
        total = F.l1_loss(rec, x) + 0.01 * kl + 0.1 * F.softplus(-self.critic(rec)).mean()
        opt_e.zero_grad()
        opt_d.zero_grad()
        total.backward()
        self.clip_gradients(opt_e, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_e.step()
        opt_d.step()


L.seed_everything(0)
loader = torch.utils.data.DataLoader(torch.rand(64, 64), batch_size=8)
# Lightning takes "16-mixed" on a GPU only; its plugin runs on a CPU too.
precision = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    plugins=[precision],
    max_steps=8,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(VAEGAN(), loader)
