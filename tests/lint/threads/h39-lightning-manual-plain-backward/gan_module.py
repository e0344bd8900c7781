import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, inplace=True))


def up(i, o):
    return nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class VAEGAN(L.LightningModule):
    def __init__(self, latent=128, lr=2e-4, width=64):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        w = width
        self.encoder = nn.Sequential(block(3, w), block(w, w * 2), block(w * 2, w * 4), nn.Flatten(), nn.LazyLinear(latent * 2))
        self.to_map = nn.Linear(latent, w * 4 * 8 * 8)
        self.decoder = nn.Sequential(up(w * 4, w * 2), up(w * 2, w), nn.ConvTranspose2d(w, 3, 4, 2, 1), nn.Tanh())
        self.critic = nn.Sequential(block(3, w), block(w, w * 2), block(w * 2, w * 4), nn.Flatten(), nn.LazyLinear(1))

    def configure_optimizers(self):
        opts, scheds = [], []
        for params in (
            self.encoder.parameters(),
            [*self.to_map.parameters(), *self.decoder.parameters()],
            self.critic.parameters(),
        ):
            opt = torch.optim.Adam(params, lr=self.hparams.lr, betas=(0.5, 0.999))
            opts.append(opt)
            scheds.append(torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=3, factor=0.5))
        return opts, scheds

    def decode(self, z):
        h = self.to_map(z).view(z.size(0), -1, 8, 8)
        return self.decoder(h)

    def encode(self, x):
        mu, logvar = self.encoder(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
        return z, kl

    def training_step(self, batch, batch_idx):
        x, _ = batch
        opt_e, opt_d, opt_c = self.optimizers()

        z, _ = self.encode(x)
        fake = self.decode(z).detach()
        c_loss = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake)).mean()
        opt_c.zero_grad()
        c_loss.backward()
        opt_c.step()

        z, kl = self.encode(x)
        rec = self.decode(z)
        rec_loss = F.l1_loss(rec, x)
        adv = F.softplus(-self.critic(rec)).mean()
        total = rec_loss + 0.01 * kl + 0.1 * adv
        opt_e.zero_grad()
        opt_d.zero_grad()
        total.backward()
        self.clip_gradients(opt_e, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_e.step()
        opt_d.step()
        self.log_dict({"c_loss": c_loss, "rec": rec_loss, "kl": kl, "adv": adv}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        z, kl = self.encode(x)
        self.log("val_rec", F.l1_loss(self.decode(z), x))

    def on_validation_epoch_end(self):
        for s in self.lr_schedulers():
            s.step(self.trainer.callback_metrics["val_rec"])
