"""DreamBooth whose launch line has a space after `--mixed_precision=`: the option is empty."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel

parser = argparse.ArgumentParser()
parser.add_argument("--max_train_steps", type=int, default=4)
parser.add_argument("--mixed_precision", type=str, default="no")
args, _ = parser.parse_known_args()

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision=args.mixed_precision if args.mixed_precision else None)
unet = UNet2DConditionModel(
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
scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(unet.parameters(), lr=5e-6)
unet, optimizer = accelerator.prepare(unet, optimizer)
weight_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision, torch.float32)
vae.to(accelerator.device, dtype=weight_dtype)

for _ in range(args.max_train_steps):
    pixels = torch.rand(2, 3, 8, 8, device=accelerator.device) * 2 - 1
    latents = vae.encode(pixels.to(dtype=weight_dtype)).latent_dist.sample() * 0.18215
    noise = torch.randn_like(latents)
    t = torch.randint(0, 1000, (2,), device=latents.device)
    hidden = torch.randn(2, 4, 32, device=latents.device, dtype=weight_dtype)
    pred = unet(scheduler.add_noise(latents, noise, t), t, hidden).sample
    loss = F.mse_loss(pred.float(), noise.float())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"mixed precision {accelerator.mixed_precision}, loss {loss.item():.3f}")
