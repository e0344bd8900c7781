import argparse
import os

import torch
import torch.cuda.amp as amp
import torch.distributed as dist
import yaml

from data import build_loader
from models import SimMIM


def get_grad_norm(parameters, norm_type=2.0):
    grads = [p.grad for p in parameters if p.grad is not None]
    return torch.stack([g.norm(norm_type) for g in grads]).norm(norm_type).item()


def train_one_epoch(config, model, data_loader, optimizer, epoch, lr_scheduler, scaler):
    model.train()
    optimizer.zero_grad()
    accum, clip = config["TRAIN"]["ACCUMULATION_STEPS"], config["TRAIN"]["CLIP_GRAD"]
    for idx, (img, mask, _) in enumerate(data_loader):
        img = img.cuda(non_blocking=True)
        mask = mask.cuda(non_blocking=True)

        with amp.autocast(enabled=config["ENABLE_AMP"]):
            loss = model(img, mask)

        if accum > 1:
            loss = loss / accum
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            else:
                grad_norm = get_grad_norm(model.parameters())
            if (idx + 1) % accum == 0:
                scaler.step(optimizer)
                optimizer.zero_grad()
                scaler.update()
                lr_scheduler.step()
        else:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            else:
                grad_norm = get_grad_norm(model.parameters())
            scaler.step(optimizer)
            scaler.update()
            lr_scheduler.step()

        if idx % config["PRINT_FREQ"] == 0 and dist.get_rank() == 0:
            print(f"Train: [{epoch}][{idx}/{len(data_loader)}] loss {loss.item():.4f} grad_norm {float(grad_norm):.4f} "
                  f"loss_scale {scaler.get_scale():.1f} lr {optimizer.param_groups[0]['lr']:.6f}")


def main(config):
    loader = build_loader(config)
    m = config["MODEL"]
    model = SimMIM(m["DIM"], m["DEPTH"], m["HEADS"], m["PATCH"], config["DATA"]["IMG_SIZE"]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["TRAIN"]["BASE_LR"], betas=(0.9, 0.999),
                                  weight_decay=config["TRAIN"]["WEIGHT_DECAY"])
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], broadcast_buffers=False)
    steps = config["TRAIN"]["EPOCHS"] * len(loader) // config["TRAIN"]["ACCUMULATION_STEPS"]
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = amp.GradScaler()
    os.makedirs(config["OUTPUT"], exist_ok=True)
    for epoch in range(config["TRAIN"]["EPOCHS"]):
        loader.sampler.set_epoch(epoch)
        train_one_epoch(config, model, loader, optimizer, epoch, lr_scheduler, scaler)
        if dist.get_rank() == 0 and epoch % config["SAVE_FREQ"] == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                        "lr_scheduler": lr_scheduler.state_dict(), "scaler": scaler.state_dict()},
                       os.path.join(config["OUTPUT"], f"ckpt_epoch_{epoch}.pth"))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--cfg", required=True)
    p.add_argument("--accumulation-steps", type=int)
    args = p.parse_args()
    with open(args.cfg) as f:
        config = yaml.safe_load(f)
    if args.accumulation_steps:
        config["TRAIN"]["ACCUMULATION_STEPS"] = args.accumulation_steps
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cudnn.benchmark = True
    main(config)
