"""Accelerate with fp16: the UNet that is trained is cast to weight_dtype together with the frozen VAE."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="fp16")
unet = UNet2DConditionModel(
    in_channels=8,
    sample_size=8,
    block_out_channels=(32, 64),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    layers_per_block=1,
    cross_attention_dim=32,
    attention_head_dim=8,
)
vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, latent_channels=4)
vae.requires_grad_(False)
unet.train()
weight_dtype = torch.float32
if accelerator.mixed_precision == "fp16":
    weight_dtype = torch.float16
elif accelerator.mixed_precision == "bf16":
    weight_dtype = torch.bfloat16
for m in (vae, unet):
    m.to(accelerator.device, dtype=weight_dtype)
noise_scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5, weight_decay=1e-2)
unet, optimizer = accelerator.prepare(unet, optimizer)


def encode(pixels):
    return vae.encode(pixels.to(accelerator.device, dtype=weight_dtype)).latent_dist.sample() * 0.18215


for _ in range(8):
    with accelerator.accumulate(unet):
        latents, cond = encode(torch.rand(2, 3, 8, 8)), encode(torch.rand(2, 3, 8, 8))
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 1000, (2,), device=latents.device)
        noisy = torch.cat([noise_scheduler.add_noise(latents, noise, timesteps), cond], dim=1)
        states = torch.randn(2, 4, 32, device=latents.device, dtype=weight_dtype)
        pred = unet(noisy, timesteps, states).sample
        loss = F.mse_loss(pred.float(), noise.float())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
