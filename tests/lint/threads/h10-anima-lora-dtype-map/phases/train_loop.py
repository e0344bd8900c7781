import math
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm


def make_noisy(latents):
    noise = torch.randn_like(latents)
    t = torch.sigmoid(torch.randn(latents.shape[0], device=latents.device))
    s = t.view(-1, 1, 1, 1)
    return (1 - s) * latents + s * noise, t, noise - latents


def run(ctx, args, model, lora, loader):
    params = [p for p in lora.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate, weight_decay=args.weight_decay)
    total = math.ceil(len(loader) / args.grad_accum) * args.epochs
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    step = 0
    for epoch in range(args.epochs):
        for i, batch in enumerate(tqdm(loader, desc=f"epoch {epoch}")):
            latents = batch["latents"].to(ctx.device, dtype=ctx.dtype)
            cond = batch["cond"].to(ctx.device, dtype=ctx.dtype)
            noisy, t, target = make_noisy(latents)
            with torch.autocast(ctx.device.type, dtype=ctx.dtype, enabled=ctx.dtype != torch.float32):
                pred = model(noisy, t.to(ctx.dtype), cond)
            loss = F.mse_loss(pred.float(), target.float())
            if not torch.isfinite(loss):
                ctx.log(f"skip non finite loss at step {step}")
                optimizer.zero_grad(set_to_none=True)
                continue
            (loss / args.grad_accum).backward()
            if (i + 1) % args.grad_accum == 0:
                torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                if step % args.save_every == 0:
                    os.makedirs(ctx.output_dir, exist_ok=True)
                    save_file(lora.state_dict_fp16(), os.path.join(ctx.output_dir, f"lora_{step:06d}.safetensors"))
        ctx.log(f"epoch {epoch} loss {loss.item():.4f}")
