import json
import os
import sys

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch.utils.data import DataLoader
from transformers import CLIPTextModel, CLIPTokenizer

from dreambooth.dataset import DreamBoothDataset
from dreambooth.ema_model import EMAModel

DTYPES = {"no": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main(args):
    device = torch.device("cuda")
    weight_dtype = DTYPES[args["weight_dtype"]]
    name = args["pretrained_model_name_or_path"]
    tokenizer = CLIPTokenizer.from_pretrained(name, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(name, subfolder="text_encoder").to(device, weight_dtype).requires_grad_(False)
    vae = AutoencoderKL.from_pretrained(name, subfolder="vae").to(device, weight_dtype).requires_grad_(False)
    unet = UNet2DConditionModel.from_pretrained(name, subfolder="unet", torch_dtype=torch.float32).to(device)
    noise_scheduler = DDPMScheduler.from_pretrained(name, subfolder="scheduler")

    ema_model = None
    if args["use_ema"]:
        ema_unet = UNet2DConditionModel.from_pretrained(name, subfolder="unet", torch_dtype=weight_dtype)
        ema_model = EMAModel(ema_unet, max_value=args["ema_decay"], device=device)
        del ema_unet

    optimizer = torch.optim.AdamW(unet.parameters(), lr=args["learning_rate"], weight_decay=1e-2)
    data = DreamBoothDataset(args["instance_dir"], args["instance_prompt"], tokenizer, args["resolution"])
    loader = DataLoader(data, batch_size=args["train_batch_size"], shuffle=True, num_workers=2)

    os.makedirs(args["output_dir"], exist_ok=True)
    global_step = 0
    unet.train()
    while global_step < args["max_train_steps"]:
        for batch in loader:
            with torch.no_grad():
                latents = vae.encode(batch["pixels"].to(device, weight_dtype)).latent_dist.sample() * 0.18215
                cond = text_encoder(batch["ids"].to(device))[0]
            noise = torch.randn_like(latents)
            t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (latents.shape[0],), device=device)
            noisy = noise_scheduler.add_noise(latents, noise, t)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                pred = unet(noisy, t, cond).sample
            loss = F.mse_loss(pred.float(), noise.float())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if ema_model is not None:
                ema_model.step(unet)
            global_step += 1
            if global_step % args["save_every"] == 0:
                out = os.path.join(args["output_dir"], str(global_step))
                (ema_model.averaged_model if ema_model is not None else unet).save_pretrained(out)
                print(global_step, loss.item())
            if global_step >= args["max_train_steps"]:
                break


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        main(json.load(f))
