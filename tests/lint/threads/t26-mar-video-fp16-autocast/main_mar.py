import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from engine_mar import train_one_epoch
from models.mar import MAR
from util.misc import CachedClips, NativeScalerWithGradNormCount, add_weight_decay


def get_args_parser():
    parser = argparse.ArgumentParser("MAR training with Diffusion Loss", add_help=False)
    parser.add_argument("--batch_size", default=16, type=int)
    parser.add_argument("--epochs", default=400, type=int)
    parser.add_argument("--embed_dim", default=768, type=int)
    parser.add_argument("--depth", default=24, type=int)
    parser.add_argument("--diffloss_d", default=6, type=int)
    parser.add_argument("--diffloss_w", default=1024, type=int)
    parser.add_argument("--diffusion_batch_mul", default=4, type=int)
    parser.add_argument("--weight_decay", default=0.02, type=float)
    parser.add_argument("--grad_clip", default=3.0, type=float)
    parser.add_argument("--blr", default=1e-4, type=float)
    parser.add_argument("--ema_rate", default=0.9999, type=float)
    parser.add_argument("--warmup_epochs", default=10, type=int)
    parser.add_argument("--cached_path", default="cached_clips")
    parser.add_argument("--resume", default="")
    parser.add_argument("--output_dir", default="output_dir")
    return parser


def main(args):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda")
    dataset = CachedClips(args.cached_path)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=args.batch_size, num_workers=8, pin_memory=True, drop_last=True)
    args.lr = args.blr * args.batch_size * dist.get_world_size() / 256

    model = MAR(args.embed_dim, args.depth, args.diffloss_d, args.diffloss_w, args.diffusion_batch_mul).to(device)
    model = DDP(model, device_ids=[torch.cuda.current_device()])
    model_without_ddp = model.module
    optimizer = torch.optim.AdamW(add_weight_decay(model_without_ddp, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    loss_scaler = NativeScalerWithGradNormCount()
    start_epoch = 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location="cpu")
        model_without_ddp.load_state_dict(ckpt["model"])
        if "optimizer" in ckpt:
            optimizer.load_state_dict(ckpt["optimizer"])
            loss_scaler.load_state_dict(ckpt["scaler"])
            start_epoch = ckpt["epoch"] + 1
    model_params = list(model_without_ddp.parameters())
    ema_params = copy.deepcopy(model_params)

    os.makedirs(args.output_dir, exist_ok=True)
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, model_params, ema_params, loader, optimizer, device, epoch, loss_scaler, args)
        if dist.get_rank() == 0:
            torch.save({"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                        "scaler": loss_scaler.state_dict()}, os.path.join(args.output_dir, "checkpoint-last.pth"))


if __name__ == "__main__":
    main(get_args_parser().parse_args())
