import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

from animatediff.dataset import FrameFolders


def main(name, output_dir, pretrained_model_path, train_data, learning_rate=1e-5, adam_beta1=0.9, adam_beta2=0.999,
         adam_weight_decay=1e-2, adam_epsilon=1e-8, train_batch_size=1, max_train_steps=100000,
         checkpointing_steps=2000, mixed_precision_training=True, max_grad_norm=1.0, seed=42):
    accelerator = Accelerator(gradient_accumulation_steps=1)
    rank, local_rank = accelerator.process_index, accelerator.device
    torch.manual_seed(seed + rank)
    output_dir = os.path.join(output_dir, name)
    os.makedirs(os.path.join(output_dir, "checkpoints"), exist_ok=True)

    noise_scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="linear")
    vae = AutoencoderKL.from_pretrained(pretrained_model_path, subfolder="vae").requires_grad_(False)
    unet = UNet2DConditionModel.from_pretrained(pretrained_model_path, subfolder="unet")
    image_encoder = CLIPVisionModelWithProjection.from_pretrained("openai/clip-vit-large-patch14").requires_grad_(False)
    image_processor = CLIPImageProcessor()

    trainable_params = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable_params, lr=learning_rate, betas=(adam_beta1, adam_beta2),
                                  weight_decay=adam_weight_decay, eps=adam_epsilon)
    unet.enable_gradient_checkpointing()

    weight_type = torch.float16
    unet.to(local_rank, dtype=weight_type)
    vae.to(local_rank, dtype=weight_type)
    image_encoder.to(local_rank, dtype=weight_type)

    dataset = FrameFolders(**train_data)
    sampler = DistributedSampler(dataset, num_replicas=accelerator.num_processes, rank=rank, shuffle=True, seed=seed)
    loader = DataLoader(dataset, batch_size=train_batch_size, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    lr_scheduler = get_scheduler("constant", optimizer=optimizer)
    unet, optimizer = accelerator.prepare(unet, optimizer)

    step, epoch = 0, 0
    while step < max_train_steps:
        sampler.set_epoch(epoch)
        epoch += 1
        unet.train()
        for pixel_values in loader:
            pixel_values = pixel_values.to(local_rank, dtype=weight_type)
            b, f = pixel_values.shape[:2]
            with torch.no_grad():
                latents = vae.encode(pixel_values.flatten(0, 1)).latent_dist.sample() * 0.18215
                ref = image_processor(images=(pixel_values[:, 0].float() * 0.5 + 0.5).cpu(), do_rescale=False, return_tensors="pt").pixel_values
                cond = image_encoder(ref.to(local_rank, dtype=weight_type), output_hidden_states=True).hidden_states[-2]
                cond = cond[..., :768].repeat_interleave(f, dim=0)
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, 1000, (b,), device=latents.device).repeat_interleave(f)
            noisy = noise_scheduler.add_noise(latents, noise, timesteps)
            model_pred = unet(noisy, timesteps, cond).sample
            loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")

            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(trainable_params, max_grad_norm)
            optimizer.step()
            lr_scheduler.step()
            step += 1
            if rank == 0 and step % 20 == 0:
                print(f"step {step} loss {loss.item():.5f}")
            if rank == 0 and step % checkpointing_steps == 0:
                torch.save({"global_step": step, "state_dict": accelerator.unwrap_model(unet).state_dict()},
                           os.path.join(output_dir, "checkpoints", f"checkpoint-{step}.ckpt"))
            if step >= max_train_steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, required=True)
    main(**OmegaConf.to_container(OmegaConf.load(parser.parse_args().config)))
