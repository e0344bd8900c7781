import os

import torch


def build_optimizer(model, config):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
                             lr=config.training.lr, betas=(0.9, 0.95), fused=True)


def build_scheduler(optimizer, config):
    w, n = config.training.warmup, config.training.train_steps
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(s / w, max(0.0, (n - s) / (n - w))))


def save_ckpt(config, model, optimizer, sched, fwd, upd):
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                "lr_scheduler": sched.state_dict(), "fwd": fwd, "upd": upd},
               os.path.join(config.training.checkpoint_dir, f"ckpt_{upd:08d}.pt"))


def load_ckpt(config, model, optimizer, sched):
    path = config.training.get("resume_ckpt", "")
    if not path:
        return 0, 0
    c = torch.load(path, map_location="cpu")
    model.module.load_state_dict(c["model"])
    optimizer.load_state_dict(c["optimizer"])
    sched.load_state_dict(c["lr_scheduler"])
    return c["fwd"], c["upd"]
