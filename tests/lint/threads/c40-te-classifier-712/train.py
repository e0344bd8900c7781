import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformer_engine.common.recipe import DelayedScaling, Format

from data import Docs, collate
from model import Classifier


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", default="data/train.jsonl")
    ap.add_argument("--vocab", type=int, default=50000)
    ap.add_argument("--classes", type=int, default=120)
    ap.add_argument("--batch", type=int, default=4096)
    ap.add_argument("--epochs", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = DDP(Classifier(args.vocab, args.classes).cuda(), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ds = Docs(args.train)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, args.batch, sampler=sampler, collate_fn=collate, drop_last=True, num_workers=4)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, (x, y) in enumerate(loader):
            x, y = x.cuda(), y.cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0 and step % 20 == 0:
                print(epoch, step, loss.item())
        if rank == 0:
            torch.save(model.module.state_dict(), f"ckpt_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
