import argparse
from pathlib import Path

import torch
import yaml
from diffusers import DDIMScheduler, UNet2DConditionModel
from tqdm import tqdm
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from lora import LoRANetwork


def parse_precision(precision):
    return {"fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
            "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}[precision]


def load_models_xl(name):
    toks = [CLIPTokenizer.from_pretrained(name, subfolder=s) for s in ("tokenizer", "tokenizer_2")]
    encs = [CLIPTextModel.from_pretrained(name, subfolder="text_encoder"),
            CLIPTextModelWithProjection.from_pretrained(name, subfolder="text_encoder_2")]
    unet = UNet2DConditionModel.from_pretrained(name, subfolder="unet")
    return toks, encs, unet, DDIMScheduler.from_pretrained(name, subfolder="scheduler")


def encode_prompt_xl(toks, encs, prompt):
    embeds = []
    for tok, enc in zip(toks, encs):
        ids = tok(prompt, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        out = enc(ids.to(enc.device), output_hidden_states=True)
        embeds.append(out.hidden_states[-2])
        pooled = out[0]
    return torch.cat(embeds, dim=-1), pooled


def predict_noise_xl(unet, scheduler, t, latents, cond, uncond, time_ids, guidance_scale):
    inp = scheduler.scale_model_input(torch.cat([latents] * 2), t)
    added = {"text_embeds": torch.cat([uncond[1], cond[1]]), "time_ids": torch.cat([time_ids] * 2)}
    noise = unet(inp, t, encoder_hidden_states=torch.cat([uncond[0], cond[0]]), added_cond_kwargs=added).sample
    n_un, n_c = noise.chunk(2)
    return n_un + guidance_scale * (n_c - n_un)


def train(cfg, prompts, device):
    weight_dtype = parse_precision(cfg["train"]["precision"])
    toks, encs, unet, scheduler = load_models_xl(cfg["pretrained_model"]["name_or_path"])
    for enc in encs:
        enc.to(device, dtype=weight_dtype).requires_grad_(False).eval()
    unet.to(device, dtype=weight_dtype)
    unet.requires_grad_(False).eval()
    unet.enable_gradient_checkpointing()

    net = cfg["network"]
    network = LoRANetwork(unet, net["rank"], net["alpha"], net["training_method"]).to(device, dtype=weight_dtype)
    optimizer = torch.optim.AdamW(network.prepare_optimizer_params(), lr=cfg["train"]["lr"])
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg["train"]["iterations"])
    criteria = torch.nn.MSELoss()
    pr = prompts[0]
    with torch.no_grad():
        emb = {k: encode_prompt_xl(toks, encs, pr[k]) for k in ("target", "positive", "neutral", "unconditional")}

    steps, res = cfg["train"]["max_denoising_steps"], cfg["train"]["resolution"]
    time_ids = torch.tensor([[res, res, 0, 0, res, res]], device=device, dtype=weight_dtype)
    save_path = Path(cfg["save"]["path"]) / cfg["save"]["name"]
    save_path.mkdir(parents=True, exist_ok=True)
    pbar = tqdm(range(cfg["train"]["iterations"]))
    for i in pbar:
        with torch.no_grad():
            scheduler.set_timesteps(steps, device=device)
            optimizer.zero_grad()
            to = torch.randint(1, steps, (1,)).item()
            latents = torch.randn(cfg["train"]["batch_size"], 4, res // 8, res // 8, device=device, dtype=weight_dtype)
            with network:
                for t in scheduler.timesteps[:to]:
                    n = predict_noise_xl(unet, scheduler, t, latents, emb["target"], emb["unconditional"], time_ids, 3)
                    latents = scheduler.step(n, t, latents).prev_sample
            scheduler.set_timesteps(1000)
            t = scheduler.timesteps[int(to * 1000 / steps)]
            pos, neu, unc = (predict_noise_xl(unet, scheduler, t, latents, emb[k], emb["unconditional"], time_ids, 1).to(weight_dtype)
                             for k in ("positive", "neutral", "unconditional"))
        with network:
            tgt = predict_noise_xl(unet, scheduler, t, latents, emb["target"], emb["unconditional"], time_ids, 1).to(weight_dtype)
        loss = criteria(tgt, neu + pr["guidance_scale"] * (pos - unc))
        pbar.set_description(f"Loss*1k: {loss.item() * 1000:.4f}")
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        if i % cfg["save"]["per_steps"] == 0 and i != 0:
            network.save_weights(save_path / f"{cfg['save']['name']}_{i}steps.pt", dtype=weight_dtype)
    network.save_weights(save_path / f"{cfg['save']['name']}_last.pt", dtype=weight_dtype)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--config_file", required=True)
    p.add_argument("--device", type=int, default=0)
    args = p.parse_args()
    with open(args.config_file) as f:
        cfg = yaml.safe_load(f)
    with open(cfg["prompts_file"]) as f:
        prompts = yaml.safe_load(f)
    train(cfg, prompts, torch.device(f"cuda:{args.device}"))
