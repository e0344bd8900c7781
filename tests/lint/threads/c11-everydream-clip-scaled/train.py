import argparse
import json

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch.cuda.amp import autocast
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import CLIPTextModel, CLIPTokenizer

from data.caption_dataset import CaptionFolder
from optimizer.optimizers import EveryDreamOptimizer, load_optimizer_config


def setup_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--config")
    pre, _ = ap.parse_known_args()
    ap.add_argument("--resume_ckpt", default="runwayml/stable-diffusion-v1-5")
    ap.add_argument("--data_root", default="input")
    ap.add_argument("--amp", action="store_true", default=False)
    ap.add_argument("--disable_amp", action="store_true", default=False)
    ap.add_argument("--clip_grad_norm", type=float, default=None)
    ap.add_argument("--grad_accum", type=int, default=1)
    ap.add_argument("--batch_size", type=int, default=4)
    ap.add_argument("--max_epochs", type=int, default=30)
    ap.add_argument("--resolution", type=int, default=512)
    ap.add_argument("--lr_scheduler", default="constant")
    ap.add_argument("--lr_warmup_steps", type=int, default=0)
    ap.add_argument("--optimizer_config", default="optimizer.json")
    if pre.config:
        ap.set_defaults(**json.load(open(pre.config)))
    return ap.parse_args()


def main(args):
    device = "cuda"
    tok = CLIPTokenizer.from_pretrained(args.resume_ckpt, subfolder="tokenizer")
    te = CLIPTextModel.from_pretrained(args.resume_ckpt, subfolder="text_encoder").to(device)
    vae = AutoencoderKL.from_pretrained(args.resume_ckpt, subfolder="vae").to(device, dtype=torch.float16)
    unet = UNet2DConditionModel.from_pretrained(args.resume_ckpt, subfolder="unet").to(device)
    sched = DDPMScheduler.from_pretrained(args.resume_ckpt, subfolder="scheduler")
    unet.enable_gradient_checkpointing()
    loader = DataLoader(CaptionFolder(args.data_root, tok, args.resolution), args.batch_size, shuffle=True, drop_last=True)
    opt = EveryDreamOptimizer(args, load_optimizer_config(args.optimizer_config), te, unet, len(loader))

    gs = 0
    for epoch in range(args.max_epochs):
        for step, batch in enumerate(tqdm(loader)):
            with torch.no_grad(), autocast(enabled=args.amp):
                latents = vae.encode(batch["image"].to(device).half()).latent_dist.sample() * 0.18215
            noise = torch.randn_like(latents)
            t = torch.randint(0, 1000, (len(latents),), device=device)
            noisy = sched.add_noise(latents, noise, t)
            with autocast(enabled=args.amp):
                cond = te(batch["tokens"].to(device)).last_hidden_state
                pred = unet(noisy, t, cond).sample
            loss = F.mse_loss(pred.float(), noise.float())
            opt.step(loss, step, gs)
            gs += 1
        print(f"epoch {epoch} loss {loss.item():.4f} scale {opt.get_scale()}")
    StableDiffusionPipeline.from_pretrained(args.resume_ckpt, unet=unet, text_encoder=te).save_pretrained("out")


if __name__ == "__main__":
    main(setup_args())
