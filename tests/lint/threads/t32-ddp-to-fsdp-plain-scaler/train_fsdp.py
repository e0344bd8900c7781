import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

from vit import Block, ViT


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="/data/imagenet/train")
    p.add_argument("--parallel", choices=["ddp", "fsdp"], default="fsdp")
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--amp", action="store_true")
    p.add_argument("--out", default="ckpt")
    return p.parse_args()


def wrap(model, args, local_rank):
    if args.parallel == "ddp":
        return DDP(model.cuda(), device_ids=[local_rank])
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return FSDP(model, auto_wrap_policy=policy, device_id=local_rank, use_orig_params=True)


def save(model, path, args):
    if args.parallel == "fsdp":
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
            sd = model.state_dict()
    else:
        sd = model.module.state_dict()
    if dist.get_rank() == 0:
        torch.save(sd, path)


def main():
    args = parse()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)

    tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(),
                    T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    ds = ImageFolder(args.data, tf)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, args.batch_size, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    model = wrap(ViT(depth=24, dim=1024, heads=16, classes=len(ds.classes)), args, local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler = GradScaler(enabled=args.amp)
    os.makedirs(args.out, exist_ok=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with autocast(enabled=args.amp):
                loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if args.parallel == "fsdp":
                model.clip_grad_norm_(1.0)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if i % 50 == 0 and dist.get_rank() == 0:
                print(f"{epoch} {i}/{len(loader)} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
        scheduler.step()
        save(model, os.path.join(args.out, f"epoch{epoch}.pt"), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
