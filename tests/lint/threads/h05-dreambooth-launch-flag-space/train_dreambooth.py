import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from tqdm.auto import tqdm
from transformers import CLIPTextModel, CLIPTokenizer


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrained_model_name_or_path", required=True)
    parser.add_argument("--instance_data_dir", required=True)
    parser.add_argument("--instance_prompt", required=True)
    parser.add_argument("--output_dir", default="text-inversion-model")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=5e-6)
    parser.add_argument("--lr_scheduler", default="constant")
    parser.add_argument("--lr_warmup_steps", type=int, default=500)
    parser.add_argument("--max_train_steps", type=int, default=None)
    parser.add_argument("--num_train_epochs", type=int, default=1)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--mixed_precision", type=str, default="no")
    args, _ = parser.parse_known_args()
    return args


class DreamBoothDataset(Dataset):
    def __init__(self, root, prompt, tokenizer, size=512):
        self.paths = [p for p in Path(root).iterdir() if p.suffix.lower() in {".jpg", ".png", ".jpeg"}]
        self.ids = tokenizer(
            prompt, truncation=True, padding="max_length", max_length=tokenizer.model_max_length, return_tensors="pt"
        ).input_ids[0]
        self.tf = transforms.Compose([
            transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return {"pixel_values": self.tf(Image.open(self.paths[i]).convert("RGB")), "input_ids": self.ids}


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision if args.mixed_precision else None,
    )
    name = args.pretrained_model_name_or_path
    tokenizer = CLIPTokenizer.from_pretrained(name, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(name, subfolder="text_encoder")
    vae = AutoencoderKL.from_pretrained(name, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(name, subfolder="unet")
    noise_scheduler = DDPMScheduler.from_pretrained(name, subfolder="scheduler")
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)

    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate, weight_decay=1e-2)
    dataset = DreamBoothDataset(args.instance_data_dir, args.instance_prompt, tokenizer, args.resolution)
    loader = DataLoader(dataset, batch_size=args.train_batch_size, shuffle=True)
    per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * per_epoch
    lr_scheduler = get_scheduler(
        args.lr_scheduler, optimizer=optimizer, num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=args.max_train_steps,
    )
    unet, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)

    weight_dtype = torch.float32
    if accelerator.mixed_precision == "fp16":
        weight_dtype = torch.float16
    elif accelerator.mixed_precision == "bf16":
        weight_dtype = torch.bfloat16
    vae.to(accelerator.device, dtype=weight_dtype)
    text_encoder.to(accelerator.device, dtype=weight_dtype)

    step = 0
    bar = tqdm(total=args.max_train_steps, disable=not accelerator.is_local_main_process)
    for epoch in range(math.ceil(args.max_train_steps / per_epoch)):
        unet.train()
        for batch in loader:
            with accelerator.accumulate(unet):
                latents = vae.encode(batch["pixel_values"].to(dtype=weight_dtype)).latent_dist.sample() * 0.18215
                noise = torch.randn_like(latents)
                t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (latents.shape[0],), device=latents.device)
                noisy = noise_scheduler.add_noise(latents, noise, t)
                hidden = text_encoder(batch["input_ids"])[0]
                pred = unet(noisy, t, hidden).sample
                loss = F.mse_loss(pred.float(), noise.float(), reduction="mean")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                bar.update(1)
            if step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        StableDiffusionPipeline.from_pretrained(name, unet=accelerator.unwrap_model(unet)).save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
