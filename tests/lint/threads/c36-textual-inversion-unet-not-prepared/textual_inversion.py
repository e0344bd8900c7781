import argparse
import math
import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import CLIPTextModel, CLIPTokenizer

TEMPLATES = ["a photo of a {}", "a rendering of a {}", "a cropped photo of the {}", "a close-up photo of a {}"]


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--pretrained_model_name_or_path", required=True)
    p.add_argument("--train_data_dir", required=True)
    p.add_argument("--placeholder_token", required=True)
    p.add_argument("--initializer_token", required=True)
    p.add_argument("--resolution", type=int, default=512)
    p.add_argument("--repeats", type=int, default=100)
    p.add_argument("--train_batch_size", type=int, default=16)
    p.add_argument("--gradient_accumulation_steps", type=int, default=1)
    p.add_argument("--max_train_steps", type=int, default=5000)
    p.add_argument("--learning_rate", type=float, default=1e-4)
    p.add_argument("--scale_lr", action="store_true")
    p.add_argument("--lr_scheduler", default="constant")
    p.add_argument("--lr_warmup_steps", type=int, default=500)
    p.add_argument("--output_dir", default="text-inversion-model")
    p.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    return p.parse_args()


class TextualInversionDataset(Dataset):
    def __init__(self, root, tokenizer, size, repeats, token):
        self.paths = [os.path.join(root, f) for f in os.listdir(root)]
        self.tok, self.size, self.n, self.token = tokenizer, size, repeats, token

    def __len__(self):
        return len(self.paths) * self.n

    def __getitem__(self, i):
        text = random.choice(TEMPLATES).format(self.token)
        ids = self.tok(text, padding="max_length", truncation=True, max_length=self.tok.model_max_length,
                       return_tensors="pt").input_ids[0]
        img = np.array(Image.open(self.paths[i % len(self.paths)]).convert("RGB").resize((self.size, self.size)))
        x = torch.from_numpy((img / 127.5 - 1.0).astype(np.float32)).permute(2, 0, 1)
        return {"input_ids": ids, "pixel_values": x}


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps,
                              mixed_precision=args.mixed_precision)
    name = args.pretrained_model_name_or_path
    tokenizer = CLIPTokenizer.from_pretrained(name, subfolder="tokenizer")
    tokenizer.add_tokens(args.placeholder_token)
    init_id = tokenizer.encode(args.initializer_token, add_special_tokens=False)[0]
    placeholder_id = tokenizer.convert_tokens_to_ids(args.placeholder_token)
    text_encoder = CLIPTextModel.from_pretrained(name, subfolder="text_encoder")
    vae = AutoencoderKL.from_pretrained(name, subfolder="vae")
    unet = UNet2DConditionModel.from_pretrained(name, subfolder="unet")
    text_encoder.resize_token_embeddings(len(tokenizer))
    emb = text_encoder.get_input_embeddings().weight.data
    emb[placeholder_id] = emb[init_id]

    vae.requires_grad_(False)
    unet.requires_grad_(False)
    text_encoder.text_model.encoder.requires_grad_(False)
    text_encoder.text_model.final_layer_norm.requires_grad_(False)
    text_encoder.text_model.embeddings.position_embedding.requires_grad_(False)

    if args.scale_lr:
        args.learning_rate *= args.gradient_accumulation_steps * args.train_batch_size * accelerator.num_processes
    optimizer = torch.optim.AdamW(text_encoder.get_input_embeddings().parameters(), lr=args.learning_rate)
    noise_scheduler = DDPMScheduler.from_pretrained(name, subfolder="scheduler")
    ds = TextualInversionDataset(args.train_data_dir, tokenizer, args.resolution, args.repeats, args.placeholder_token)
    loader = DataLoader(ds, batch_size=args.train_batch_size, shuffle=True)
    lr_scheduler = get_scheduler(args.lr_scheduler, optimizer, num_warmup_steps=args.lr_warmup_steps,
                                 num_training_steps=args.max_train_steps)

    text_encoder, optimizer, loader, lr_scheduler = accelerator.prepare(
        text_encoder, optimizer, loader, lr_scheduler)
    vae.to(accelerator.device)
    unet.to(accelerator.device)
    vae.eval()
    unet.eval()

    orig = accelerator.unwrap_model(text_encoder).get_input_embeddings().weight.data.clone()
    bar = tqdm(range(args.max_train_steps), disable=not accelerator.is_local_main_process)
    step = 0
    for _ in range(math.ceil(args.max_train_steps / max(1, len(loader)))):
        text_encoder.train()
        for batch in loader:
            with accelerator.accumulate(text_encoder):
                latents = vae.encode(batch["pixel_values"]).latent_dist.sample().detach() * 0.18215
                noise = torch.randn_like(latents)
                t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),),
                                  device=latents.device).long()
                noisy = noise_scheduler.add_noise(latents, noise, t)
                states = text_encoder(batch["input_ids"])[0]
                pred = unet(noisy, t, states).sample
                loss = F.mse_loss(pred, noise, reduction="none").mean([1, 2, 3]).mean()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                keep = torch.arange(len(tokenizer)) != placeholder_id
                with torch.no_grad():
                    accelerator.unwrap_model(text_encoder).get_input_embeddings().weight[keep] = orig[keep]
            if accelerator.sync_gradients:
                bar.update(1)
                step += 1
            if step >= args.max_train_steps:
                break
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
        w = accelerator.unwrap_model(text_encoder).get_input_embeddings().weight[placeholder_id]
        torch.save({args.placeholder_token: w.detach().cpu()}, os.path.join(args.output_dir, "learned_embeds.bin"))


if __name__ == "__main__":
    main()
