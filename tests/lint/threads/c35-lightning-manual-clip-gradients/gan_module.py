import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, latent_dim, img_shape):
        super().__init__()
        self.img_shape = img_shape

        def block(i, o, normalize=True):
            layers = [nn.Linear(i, o)]
            if normalize:
                layers.append(nn.BatchNorm1d(o, 0.8))
            return layers + [nn.LeakyReLU(0.2, inplace=True)]

        self.model = nn.Sequential(*block(latent_dim, 128, False), *block(128, 256), *block(256, 512),
                                   nn.Linear(512, int(torch.tensor(img_shape).prod())), nn.Tanh())

    def forward(self, z):
        return self.model(z).view(z.size(0), *self.img_shape)


class Discriminator(nn.Module):
    def __init__(self, img_shape):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(int(torch.tensor(img_shape).prod()), 512), nn.LeakyReLU(0.2),
                                   nn.Linear(512, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def forward(self, img):
        return self.model(img.flatten(1))


class GAN(pl.LightningModule):
    def __init__(self, img_shape=(1, 28, 28), latent_dim=100, lr=2e-4, b1=0.5, b2=0.999, clip=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_dim, img_shape)
        self.discriminator = Discriminator(img_shape)

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch):
        imgs, _ = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim, device=self.device)

        self.toggle_optimizer(opt_g)
        fake = self(z)
        score = self.discriminator(fake)
        g_loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
        self.log("g_loss", g_loss, prog_bar=True)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(opt_g, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        real, fake = self.discriminator(imgs), self.discriminator(self(z).detach())
        d_loss = (F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
                  + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(opt_d, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
        opt_d.step()
        self.untoggle_optimizer(opt_d)

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        return [torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas),
                torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)], []
