import argparse
import json
import logging
import os
from pathlib import Path

import numpy as np
import torch
import torch.optim as optim
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader
from tqdm import tqdm

from datasets_kubric import KubricMovifDataset, collate_fn_train
from losses import balanced_ce_loss, sequence_loss
from tracker import TrackerNet


def fetch_optimizer(args, model):
    optimizer = optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wdecay, eps=1e-8)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.num_steps + 100, pct_start=0.05,
                                              cycle_momentum=False, anneal_strategy="linear")
    return optimizer, scheduler


def forward_batch(batch, model, args):
    video, trajs_g, vis_g = batch["video"], batch["trajectory"], batch["visibility"]
    queries = torch.cat([torch.zeros_like(trajs_g[:, 0, :, :1]), trajs_g[:, 0]], dim=2)
    preds, vis = model(video, queries, iters=args.train_iters)
    return sequence_loss(preds, trajs_g, vis_g), balanced_ce_loss(vis, vis_g)


def save_checkpoint(args, model, optimizer, scheduler, total_steps, epoch):
    path = Path(f"{args.ckpt_path}/model_{args.model_name}_{total_steps:06d}.pth")
    save_dict = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "total_steps": total_steps,
    }
    logging.info("Saving file %s", path)
    torch.save(save_dict, path)


def main(args):
    torch.manual_seed(0)
    np.random.seed(0)
    model = TrackerNet(stride=4).cuda()
    ds = KubricMovifDataset(args.dataset_root, crop_size=(384, 512), seq_len=args.sequence_len, traj_per_sample=256)
    train_loader = DataLoader(ds, args.batch_size, shuffle=True, num_workers=args.num_workers,
                              pin_memory=True, collate_fn=collate_fn_train, drop_last=True)
    optimizer, scheduler = fetch_optimizer(args, model)

    total_steps = 0
    folder_ckpts = sorted(f for f in os.listdir(args.ckpt_path) if "final" not in f and f.endswith(".pth"))
    if folder_ckpts:
        ckpt = torch.load(os.path.join(args.ckpt_path, folder_ckpts[-1]))
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        total_steps = ckpt["total_steps"]
        logging.info("Resuming from step %d", total_steps)

    model.train()
    scaler = GradScaler(enabled=args.mixed_precision)
    epoch = -1
    while total_steps <= args.num_steps:
        epoch += 1
        for batch, gotit in tqdm(train_loader):
            if not all(gotit):
                continue
            batch = {k: v.cuda() for k, v in batch.items()}
            optimizer.zero_grad()
            with autocast(enabled=args.mixed_precision):
                flow, vis = forward_batch(batch, model, args)
                loss = flow + 10.0 * vis
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scheduler.step()
            scaler.update()
            total_steps += 1
            if total_steps % args.save_freq == 0:
                save_checkpoint(args, model, optimizer, scheduler, total_steps, epoch)
            if total_steps > args.num_steps:
                break
    torch.save(model.state_dict(), f"{args.ckpt_path}/{args.model_name}_final.pth")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", default="cotracker")
    parser.add_argument("--ckpt_path", required=True)
    parser.add_argument("--dataset_root", required=True)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--num_workers", type=int, default=10)
    parser.add_argument("--mixed_precision", action="store_true")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--wdecay", type=float, default=1e-5)
    parser.add_argument("--num_steps", type=int, default=200000)
    parser.add_argument("--save_freq", type=int, default=100)
    parser.add_argument("--sequence_len", type=int, default=24)
    parser.add_argument("--train_iters", type=int, default=4)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    Path(args.ckpt_path).mkdir(exist_ok=True, parents=True)
    with open(f"{args.ckpt_path}/args.json", "w") as f:
        json.dump(vars(args), f)
    main(args)
