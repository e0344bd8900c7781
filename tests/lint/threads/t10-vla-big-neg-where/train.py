import argparse
from contextlib import nullcontext

import torch
from torch.utils.data import DataLoader, Dataset

from lerobot_lite.policies.pi0 import PI0Policy


class EpisodeDataset(Dataset):
    def __init__(self, path):
        self.frames = torch.load(path, mmap=True)

    def __len__(self):
        return len(self.frames["action"])

    def __getitem__(self, i):
        return {k: v[i] for k, v in self.frames.items()}


def update_policy(policy, batch, optimizer, grad_clip_norm, scaler, scheduler, use_amp):
    policy.train()
    with torch.autocast(device_type="cuda") if use_amp else nullcontext():
        loss = policy(batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip_norm, error_if_nonfinite=False)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
    return loss.item(), grad_norm.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dataset", default="data/episodes.pt")
    p.add_argument("--steps", type=int, default=30000)
    p.add_argument("--batch_size", type=int, default=8)
    p.add_argument("--use_amp", action="store_true")
    args = p.parse_args()
    policy = PI0Policy().to("cuda")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2.5e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scaler = torch.amp.GradScaler("cuda", enabled=args.use_amp)
    loader = DataLoader(EpisodeDataset(args.dataset), batch_size=args.batch_size, shuffle=True, drop_last=True)
    step = 0
    while step < args.steps:
        for batch in loader:
            batch = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}
            loss, gn = update_policy(policy, batch, optimizer, 10.0, scaler, scheduler, args.use_amp)
            step += 1
            if step % 200 == 0:
                print(step, loss, gn)
            if step % 10000 == 0:
                torch.save(policy.state_dict(), f"policy_{step}.pt")
            if step >= args.steps:
                break


if __name__ == "__main__":
    main()
