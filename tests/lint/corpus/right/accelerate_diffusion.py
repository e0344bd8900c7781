"""Fine-tuning a diffusion model: what is frozen is cast down, what is trained stays in FP32."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel


def main(args, train_dataloader):
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    noise_scheduler = DDPMScheduler.from_pretrained(args.model, subfolder="scheduler")
    text_encoder = CLIPTextModel.from_pretrained(args.model, subfolder="text_encoder")
    vae = AutoencoderKL.from_pretrained(args.model, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet")
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.train()

    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
    unet, optimizer, train_dataloader = accelerator.prepare(unet, optimizer, train_dataloader)

    weight_dtype = torch.float32
    if accelerator.mixed_precision == "fp16":
        weight_dtype = torch.float16
    elif accelerator.mixed_precision == "bf16":
        weight_dtype = torch.bfloat16
    text_encoder.to(accelerator.device, dtype=weight_dtype)
    vae.to(accelerator.device, dtype=weight_dtype)

    for batch in train_dataloader:
        with accelerator.accumulate(unet):
            latents = vae.encode(batch["pixel_values"].to(weight_dtype)).latent_dist.sample()
            latents = latents * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, 1000, (latents.shape[0],), device=latents.device).long()
            noisy = noise_scheduler.add_noise(latents, noise, timesteps)
            states = text_encoder(batch["input_ids"])[0]
            predicted = unet(noisy, timesteps, states).sample
            loss = F.mse_loss(predicted.float(), noise.float(), reduction="mean")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    pipeline = StableDiffusionPipeline.from_pretrained(
        args.model, unet=accelerator.unwrap_model(unet), torch_dtype=weight_dtype
    ).to(accelerator.device)
    with torch.inference_mode(), torch.autocast("cuda"):
        pipeline("a cat").images[0].save("cat.png")
