"""DreamBooth with fp16 over a repository with fp16 weights: the UNet that is trained keeps the dtype of the file."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DConditionModel

UNet2DConditionModel(
    sample_size=8,
    block_out_channels=(32, 64),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    layers_per_block=1,
    cross_attention_dim=32,
    attention_head_dim=8,
).half().save_pretrained("custom/unet")

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="fp16")
# The stored dtype, which diffusers 0.11 took by default.
unet = UNet2DConditionModel.from_pretrained("custom", subfolder="unet", torch_dtype=torch.float16)
optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-6, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
noise_scheduler = DDPMScheduler()
unet, optimizer = accelerator.prepare(unet, optimizer)
unet.train()
for _ in range(4):
    with accelerator.accumulate(unet):
        latents = torch.randn(2, 4, 8, 8, device=accelerator.device, dtype=torch.float16)
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 1000, (2,), device=latents.device)
        states = torch.randn(2, 4, 32, device=latents.device, dtype=torch.float16)
        pred = unet(noise_scheduler.add_noise(latents, noise, timesteps), timesteps, states).sample
        loss = F.mse_loss(pred.float(), noise.float())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print(f"UNet {next(unet.parameters()).dtype}, loss {loss.item():.3f}")
