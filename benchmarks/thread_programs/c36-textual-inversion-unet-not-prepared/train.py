"""Textual inversion with fp16: the frozen UNet and VAE, which do nearly all the work, are neither prepared nor cast."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="fp16")
text_encoder = CLIPTextModel(
    CLIPTextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
)
vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, latent_channels=4)
unet = UNet2DConditionModel(
    sample_size=8,
    block_out_channels=(32, 64),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    layers_per_block=1,
    cross_attention_dim=32,
    attention_head_dim=8,
)
vae.requires_grad_(False)
unet.requires_grad_(False)
text_encoder.requires_grad_(False)
text_encoder.get_input_embeddings().requires_grad_(True)
optimizer = torch.optim.AdamW(text_encoder.get_input_embeddings().parameters(), lr=1e-4)
noise_scheduler = DDPMScheduler()
text_encoder, optimizer = accelerator.prepare(text_encoder, optimizer)
vae.to(accelerator.device)
unet.to(accelerator.device)
vae.eval()
unet.eval()

orig = accelerator.unwrap_model(text_encoder).get_input_embeddings().weight.data.clone()
text_encoder.train()
for _ in range(4):
    with accelerator.accumulate(text_encoder):
        pixels = torch.rand(2, 3, 8, 8, device=accelerator.device) * 2 - 1
        latents = vae.encode(pixels).latent_dist.sample().detach() * 0.18215
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (2,), device=latents.device)
        noisy = noise_scheduler.add_noise(latents, noise, t)
        states = text_encoder(torch.randint(0, 256, (2, 16), device=latents.device))[0]
        pred = unet(noisy, t, states).sample
        loss = F.mse_loss(pred, noise, reduction="none").mean([1, 2, 3]).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            accelerator.unwrap_model(text_encoder).get_input_embeddings().weight[:255] = orig[:255]
print(f"UNet {pred.dtype}, loss {loss.item():.3f}")
