"""A loop under bf16 autocast whose EMA copy of the UNet is loaded in bf16: small updates of the average round away."""

import copy

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel


class EMAModel:
    def __init__(self, model, max_value=0.9999):
        self.averaged_model = copy.deepcopy(model).eval()
        self.averaged_model.requires_grad_(False)
        self.max_value = max_value
        self.optimization_step = 0

    @torch.no_grad()
    def step(self, new_model):
        decay = min(self.max_value, max(0.0, 1 - (1 + self.optimization_step) ** (-2 / 3)))
        params = dict(self.averaged_model.named_parameters())
        for name, p in new_model.named_parameters():
            params[name].mul_(decay)
            params[name].add_(p.data.to(dtype=params[name].dtype), alpha=1 - decay)
        self.optimization_step += 1


torch.manual_seed(0)
weight_dtype = torch.bfloat16
unet = UNet2DModel(
    sample_size=8,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    layers_per_block=1,
)
unet.save_pretrained("base")
ema_model = EMAModel(UNet2DModel.from_pretrained("base", torch_dtype=weight_dtype))
scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-6, weight_decay=1e-2)
unet.train()
for _ in range(4):
    latents = torch.randn(2, 3, 8, 8)
    noise = torch.randn_like(latents)
    t = torch.randint(0, 1000, (2,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = unet(scheduler.add_noise(latents, noise, t), t).sample
    loss = F.mse_loss(pred.float(), noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ema_model.step(unet)
print(f"loss {loss.item():.3f}, average in {ema_model.averaged_model.dtype}")
