import argparse
import math
import os
import random

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from tqdm.auto import tqdm
from transformers import CLIPTextModel, CLIPTokenizer

TEMPLATES = ["a photo of a {}", "a rendering of a {}", "a close-up photo of a {}", "a bright photo of the {}"]


class TextualInversionDataset(Dataset):
    def __init__(self, root, tokenizer, token, size=512, repeats=100):
        self.paths = [os.path.join(root, f) for f in os.listdir(root)]
        self.tok, self.token, self.repeats = tokenizer, token, repeats
        self.tf = transforms.Compose([
            transforms.Resize(size), transforms.CenterCrop(size), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(), transforms.Normalize([0.5], [0.5]),
        ])

    def __len__(self):
        return len(self.paths) * self.repeats

    def __getitem__(self, i):
        text = random.choice(TEMPLATES).format(self.token)
        ids = self.tok(
            text, padding="max_length", truncation=True, max_length=self.tok.model_max_length, return_tensors="pt"
        ).input_ids[0]
        image = Image.open(self.paths[i % len(self.paths)]).convert("RGB")
        return {"pixel_values": self.tf(image), "input_ids": ids}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="runwayml/stable-diffusion-v1-5")
    p.add_argument("--train_data_dir", default="concept")
    p.add_argument("--placeholder_token", default="<cat-toy>")
    p.add_argument("--initializer_token", default="toy")
    p.add_argument("--learning_rate", type=float, default=5e-4)
    p.add_argument("--train_batch_size", type=int, default=2)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--max_train_steps", type=int, default=2000)
    p.add_argument("--output_dir", default="sd-concept-output")
    args = p.parse_args()

    dtype = torch.float16
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    tokenizer = CLIPTokenizer.from_pretrained(args.model, subfolder="tokenizer")
    assert tokenizer.add_tokens(args.placeholder_token) == 1
    init_id = tokenizer.encode(args.initializer_token, add_special_tokens=False)[0]
    placeholder_id = tokenizer.convert_tokens_to_ids(args.placeholder_token)

    text_encoder = CLIPTextModel.from_pretrained(args.model, subfolder="text_encoder", torch_dtype=dtype)
    vae = AutoencoderKL.from_pretrained(args.model, subfolder="vae", torch_dtype=dtype)
    unet = UNet2DConditionModel.from_pretrained(args.model, subfolder="unet", torch_dtype=dtype)
    scheduler = DDPMScheduler.from_pretrained(args.model, subfolder="scheduler")
    text_encoder.resize_token_embeddings(len(tokenizer))
    emb = text_encoder.get_input_embeddings().weight.data
    emb[placeholder_id] = emb[init_id]

    for m in (vae, unet, text_encoder.text_model.encoder, text_encoder.text_model.final_layer_norm,
              text_encoder.text_model.embeddings.position_embedding):
        m.requires_grad_(False)

    optimizer = torch.optim.AdamW(text_encoder.get_input_embeddings().parameters(), lr=args.learning_rate)
    data = TextualInversionDataset(args.train_data_dir, tokenizer, args.placeholder_token)
    loader = DataLoader(data, batch_size=args.train_batch_size, shuffle=True)
    text_encoder, optimizer, loader = accelerator.prepare(text_encoder, optimizer, loader)
    vae.to(accelerator.device).eval()
    unet.to(accelerator.device).train()

    step = 0
    bar = tqdm(total=args.max_train_steps)
    for epoch in range(math.ceil(args.max_train_steps / len(loader) * args.gradient_accumulation_steps)):
        text_encoder.train()
        for batch in loader:
            with accelerator.accumulate(text_encoder):
                latents = vae.encode(batch["pixel_values"].to(dtype)).latent_dist.sample().detach() * 0.18215
                noise = torch.randn_like(latents)
                t = torch.randint(0, scheduler.config.num_train_timesteps, (latents.shape[0],), device=latents.device).long()
                noisy = scheduler.add_noise(latents, noise, t)
                hidden = text_encoder(batch["input_ids"])[0]
                pred = unet(noisy, t, hidden.to(dtype)).sample
                loss = F.mse_loss(pred, noise, reduction="none").mean([1, 2, 3]).mean()
                accelerator.backward(loss)
                grads = accelerator.unwrap_model(text_encoder).get_input_embeddings().weight.grad
                keep = torch.arange(len(tokenizer), device=grads.device) != placeholder_id
                grads.data[keep, :] = grads.data[keep, :].fill_(0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                bar.update(1)
                bar.set_postfix(loss=loss.item())
            if step >= args.max_train_steps:
                break
    learned = accelerator.unwrap_model(text_encoder).get_input_embeddings().weight[placeholder_id].detach().cpu()
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save({args.placeholder_token: learned}, os.path.join(args.output_dir, "learned_embeds.bin"))


if __name__ == "__main__":
    main()
