"""A GAN with one GradScaler for both optimizers: `update` is called after each of the two steps."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
device = "cpu"
net_g = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(), nn.Conv2d(8, 48, 3, padding=1), nn.PixelShuffle(4))
net_d = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.LeakyReLU(0.1), nn.Conv2d(8, 1, 1))
optimizer_g = torch.optim.AdamW(net_g.parameters(), lr=1e-4, betas=(0.9, 0.99))
optimizer_d = torch.optim.AdamW(net_d.parameters(), lr=1e-4, betas=(0.9, 0.99))
gradscaler = GradScaler(device, init_scale=2**11)
cri_pix, cri_gan = nn.L1Loss(), nn.BCEWithLogitsLoss()


def gan(pred, real):
    return cri_gan(pred, torch.full_like(pred, 1.0 if real else 0.0))


for _ in range(4):
    lq, gt = torch.rand(2, 3, 8, 8), torch.rand(2, 3, 32, 32)
    net_d.requires_grad_(False)
    optimizer_g.zero_grad(set_to_none=True)
    with autocast(device, dtype=torch.float16):
        output = net_g(lq)
        l_g = cri_pix(output, gt) + 0.1 * gan(net_d(output), True)
    gradscaler.scale(l_g).backward()
    gradscaler.step(optimizer_g)
    gradscaler.update()

    net_d.requires_grad_(True)
    optimizer_d.zero_grad(set_to_none=True)
    with autocast(device, dtype=torch.float16):
        l_d_real = gan(net_d(gt), True)
        l_d_fake = gan(net_d(output.detach()), False)
    gradscaler.scale(l_d_real).backward()
    gradscaler.scale(l_d_fake).backward()
    gradscaler.step(optimizer_d)
    gradscaler.update()
print(f"loss {l_g.item():.3f}, scale {gradscaler.get_scale():g}")
