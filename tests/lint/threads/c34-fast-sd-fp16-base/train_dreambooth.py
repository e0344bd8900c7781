import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from tqdm.auto import tqdm
from transformers import CLIPTextModel, CLIPTokenizer


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--pretrained_model_name_or_path", required=True)
    p.add_argument("--instance_data_dir", required=True)
    p.add_argument("--output_dir", default="text-inversion-model")
    p.add_argument("--seed", type=int, default=None)
    p.add_argument("--resolution", type=int, default=512)
    p.add_argument("--train_text_encoder", action="store_true")
    p.add_argument("--train_only_unet", action="store_true")
    p.add_argument("--image_captions_filename", action="store_true")
    p.add_argument("--train_batch_size", type=int, default=1)
    p.add_argument("--gradient_accumulation_steps", type=int, default=1)
    p.add_argument("--gradient_checkpointing", action="store_true")
    p.add_argument("--learning_rate", type=float, default=2e-6)
    p.add_argument("--lr_scheduler", default="polynomial")
    p.add_argument("--lr_warmup_steps", type=int, default=0)
    p.add_argument("--max_train_steps", type=int, default=2100)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--use_8bit_adam", action="store_true")
    p.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    return p.parse_args()


class DreamBoothDataset(Dataset):
    def __init__(self, root, tokenizer, size, args):
        self.paths = list(Path(root).iterdir())
        self.tokenizer, self.args = tokenizer, args
        self.tf = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor(),
                                      transforms.Normalize([0.5], [0.5])])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        path = self.paths[i]
        pt = "".join(c for c in path.stem if not c.isdigit()).replace("_", " ").strip("()- ")
        ids = self.tokenizer(pt, truncation=True, padding="max_length", max_length=self.tokenizer.model_max_length,
                             return_tensors="pt").input_ids[0]
        return {"pixel_values": self.tf(Image.open(path).convert("RGB")), "input_ids": ids}


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps,
                              mixed_precision=args.mixed_precision)
    if args.seed is not None:
        set_seed(args.seed)
    name = args.pretrained_model_name_or_path
    tokenizer = CLIPTokenizer.from_pretrained(name, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(name, subfolder="text_encoder")
    vae = AutoencoderKL.from_pretrained(name, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(name, subfolder="unet")
    vae.requires_grad_(False)
    if not args.train_text_encoder:
        text_encoder.requires_grad_(False)
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
        if args.train_text_encoder:
            text_encoder.gradient_checkpointing_enable()

    if args.use_8bit_adam:
        import bitsandbytes as bnb
        optimizer_class = bnb.optim.AdamW8bit
    else:
        optimizer_class = torch.optim.AdamW
    params = itertools.chain(unet.parameters(), text_encoder.parameters()) if args.train_text_encoder \
        else unet.parameters()
    optimizer = optimizer_class(params, lr=args.learning_rate, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
    noise_scheduler = DDPMScheduler.from_pretrained(name, subfolder="scheduler")
    loader = DataLoader(DreamBoothDataset(args.instance_data_dir, tokenizer, args.resolution, args),
                        args.train_batch_size, shuffle=True)
    lr_scheduler = get_scheduler(args.lr_scheduler, optimizer, num_warmup_steps=args.lr_warmup_steps,
                                 num_training_steps=args.max_train_steps)
    if args.train_text_encoder:
        unet, text_encoder, optimizer, loader, lr_scheduler = accelerator.prepare(
            unet, text_encoder, optimizer, loader, lr_scheduler)
    else:
        unet, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)
    weight_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.mixed_precision, torch.float32)
    vae.to(accelerator.device, dtype=weight_dtype)
    if not args.train_text_encoder:
        text_encoder.to(accelerator.device, dtype=weight_dtype)

    bar = tqdm(range(args.max_train_steps), disable=not accelerator.is_local_main_process)
    global_step = 0
    unet.train()
    while global_step < args.max_train_steps:
        for batch in loader:
            with accelerator.accumulate(unet):
                with torch.no_grad():
                    latents = vae.encode(batch["pixel_values"].to(dtype=weight_dtype)).latent_dist.sample() * 0.18215
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),),
                                          device=latents.device).long()
                noisy = noise_scheduler.add_noise(latents, noise, timesteps)
                states = text_encoder(batch["input_ids"])[0]
                pred = unet(noisy, timesteps, states).sample
                loss = F.mse_loss(pred.float(), noise.float(), reduction="mean")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    params_to_clip = itertools.chain(unet.parameters(), text_encoder.parameters()) \
                        if args.train_text_encoder else unet.parameters()
                    accelerator.clip_grad_norm_(params_to_clip, args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                bar.update(1)
                global_step += 1
                bar.set_postfix(loss=loss.item())
            if global_step >= args.max_train_steps:
                break
    if accelerator.is_main_process:
        StableDiffusionPipeline.from_pretrained(name, unet=accelerator.unwrap_model(unet),
                                                text_encoder=accelerator.unwrap_model(text_encoder)
                                                ).save_pretrained(os.path.join(args.output_dir))


if __name__ == "__main__":
    main()
