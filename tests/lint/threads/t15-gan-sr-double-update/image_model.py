import os

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

from archs import Compact, PatchD


class ImageModel:
    def __init__(self, opt):
        self.opt = opt
        self.device = torch.device("cuda")
        self.net_g, self.net_d = Compact(opt["scale"]).to(self.device), PatchD().to(self.device)
        tr = opt["train"]
        self.optimizer_g = torch.optim.AdamW(self.net_g.parameters(), **tr["optim_g"])
        self.optimizer_d = torch.optim.AdamW(self.net_d.parameters(), **tr["optim_d"])
        self.scheduler_g = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer_g, tr["total_iter"])
        self.scheduler_d = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer_d, tr["total_iter"])
        self.use_amp = opt.get("use_amp", False)
        self.gradscaler = GradScaler(init_scale=2 ** 11, enabled=self.use_amp)
        self.cri_pix, self.cri_gan = nn.L1Loss(), nn.BCEWithLogitsLoss()

    def gan(self, pred, real):
        return self.cri_gan(pred, torch.full_like(pred, 1.0 if real else 0.0))

    def feed_data(self, data):
        self.lq, self.gt = data["lq"].to(self.device, non_blocking=True), data["gt"].to(self.device, non_blocking=True)

    def optimize_parameters(self, current_iter):
        tr = self.opt["train"]
        logs = {}
        for p in self.net_d.parameters():
            p.requires_grad = False
        self.optimizer_g.zero_grad(set_to_none=True)
        with autocast(enabled=self.use_amp):
            self.output = self.net_g(self.lq)
            l_pix = self.cri_pix(self.output, self.gt) * tr["pixel_weight"]
            l_gan = self.gan(self.net_d(self.output), True) * tr["gan_weight"]
            l_g = l_pix + l_gan
        self.gradscaler.scale(l_g).backward()
        self.gradscaler.step(self.optimizer_g)
        self.gradscaler.update()

        for p in self.net_d.parameters():
            p.requires_grad = True
        self.optimizer_d.zero_grad(set_to_none=True)
        with autocast(enabled=self.use_amp):
            l_d_real = self.gan(self.net_d(self.gt), True)
            l_d_fake = self.gan(self.net_d(self.output.detach()), False)
        self.gradscaler.scale(l_d_real).backward()
        self.gradscaler.scale(l_d_fake).backward()
        self.gradscaler.step(self.optimizer_d)
        self.gradscaler.update()

        self.scheduler_g.step()
        self.scheduler_d.step()
        logs.update(l_pix=l_pix.item(), l_gan=l_gan.item(), l_d_real=l_d_real.item(), l_d_fake=l_d_fake.item(),
                    scale=self.gradscaler.get_scale())
        return logs

    def save(self, it):
        os.makedirs("experiments", exist_ok=True)
        torch.save({"g": self.net_g.state_dict(), "d": self.net_d.state_dict(), "og": self.optimizer_g.state_dict(),
                    "od": self.optimizer_d.state_dict(), "scaler": self.gradscaler.state_dict(), "iter": it},
                   f"experiments/{self.opt['name']}_{it}.pth")
