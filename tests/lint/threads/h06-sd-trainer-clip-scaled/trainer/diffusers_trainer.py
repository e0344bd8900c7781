import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tqdm
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import CLIPTextModel, CLIPTokenizer

from dataset import CaptionedImages


def bool_t(x):
    return x.lower() in ("true", "yes", "1")


parser = argparse.ArgumentParser(description="Stable Diffusion Finetuner")
parser.add_argument("--model", type=str, required=True)
parser.add_argument("--run_name", type=str, required=True)
parser.add_argument("--dataset", type=str, required=True)
parser.add_argument("--lr", type=float, default=5e-6)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=1)
parser.add_argument("--use_ema", type=bool_t, default="False")
parser.add_argument("--ucg", type=float, default=0.1)
parser.add_argument("--gradient_checkpointing", type=bool_t, default="False")
parser.add_argument("--lr_scheduler", type=str, default="cosine")
parser.add_argument("--lr_scheduler_warmup", type=float, default=0.05)
parser.add_argument("--save_steps", type=int, default=500)
parser.add_argument("--output_path", type=str, default="./output")
parser.add_argument("--fp16", type=bool_t, default="False")
parser.add_argument("--clip_penultimate", type=bool_t, default="False")
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()


def setup():
    dist.init_process_group("nccl", init_method="env://")


def save_checkpoint(unet, vae, text_encoder, tokenizer, step):
    pipe = StableDiffusionPipeline.from_pretrained(
        args.model, unet=unet, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer
    )
    pipe.save_pretrained(os.path.join(args.output_path, f"{args.run_name}_{step}"))


def main():
    setup()
    rank = int(os.environ["LOCAL_RANK"])
    world_size = dist.get_world_size()
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    torch.manual_seed(args.seed + rank)
    weight_dtype = torch.float16 if args.fp16 else torch.float32

    tokenizer = CLIPTokenizer.from_pretrained(args.model, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(args.model, subfolder="text_encoder")
    vae = AutoencoderKL.from_pretrained(args.model, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet")
    noise_scheduler = DDPMScheduler.from_pretrained(args.model, subfolder="scheduler")
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    vae = vae.to(device, dtype=weight_dtype)
    text_encoder = text_encoder.to(device, dtype=weight_dtype)
    unet = unet.to(device, dtype=torch.float32)
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()

    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=1e-2)
    dataset = CaptionedImages(args.dataset, tokenizer, ucg=args.ucg)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=2, pin_memory=True)
    total_steps = len(loader) * args.epochs
    lr_scheduler = get_scheduler(
        args.lr_scheduler, optimizer=optimizer,
        num_warmup_steps=int(args.lr_scheduler_warmup * total_steps), num_training_steps=total_steps,
    )
    unet = DDP(unet, device_ids=[rank], output_device=rank, gradient_as_bucket_view=True)
    scaler = torch.cuda.amp.GradScaler(enabled=args.fp16)

    global_step = 0
    progress = tqdm.tqdm(range(total_steps), disable=rank != 0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        unet.train()
        for batch in loader:
            with torch.no_grad():
                pixels = batch["pixel_values"].to(device, dtype=weight_dtype)
                latents = vae.encode(pixels).latent_dist.sample() * 0.18215
                noise = torch.randn_like(latents)
                timesteps = torch.randint(
                    0, noise_scheduler.config.num_train_timesteps, (latents.shape[0],), device=device
                ).long()
                noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
                hidden = text_encoder(batch["input_ids"].to(device), output_hidden_states=True)
                context = (
                    text_encoder.text_model.final_layer_norm(hidden.hidden_states[-2])
                    if args.clip_penultimate else hidden.last_hidden_state
                )
            with torch.autocast("cuda", enabled=args.fp16):
                noise_pred = unet(noisy_latents, timesteps, context).sample
            loss = F.mse_loss(noise_pred.float(), noise.float(), reduction="mean")

            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            lr_scheduler.step()
            optimizer.zero_grad(set_to_none=True)

            global_step += 1
            progress.update(1)
            if rank == 0:
                progress.set_postfix(loss=loss.item(), lr=lr_scheduler.get_last_lr()[0])
                if global_step % args.save_steps == 0:
                    save_checkpoint(unet.module, vae, text_encoder, tokenizer, global_step)
            dist.barrier()
    if rank == 0:
        save_checkpoint(unet.module, vae, text_encoder, tokenizer, "final")
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
