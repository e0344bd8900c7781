from __future__ import division, print_function

import argparse
import os

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim

from core.flow import FlowNet
from core.datasets import fetch_dataloader
from core.loss import sequence_loss

try:
    from torch.cuda.amp import GradScaler
except ImportError:
    class GradScaler:
        def __init__(self, enabled=False):
            pass

        def scale(self, loss):
            return loss

        def unscale_(self, optimizer):
            pass

        def step(self, optimizer):
            optimizer.step()

        def update(self):
            pass

SUM_FREQ = 100
VAL_FREQ = 5000


def count_parameters(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def fetch_optimizer(args, model):
    optimizer = optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wdecay, eps=args.epsilon)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.num_steps + 100,
                                              pct_start=0.05, cycle_momentum=False, anneal_strategy="linear")
    return optimizer, scheduler


class Logger:
    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.total_steps = 0
        self.running = {}

    def push(self, metrics):
        self.total_steps += 1
        for k, v in metrics.items():
            self.running[k] = self.running.get(k, 0.0) + v
        if self.total_steps % SUM_FREQ == SUM_FREQ - 1:
            line = ", ".join(f"{k} {v / SUM_FREQ:.4f}" for k, v in sorted(self.running.items()))
            print(f"[{self.total_steps + 1:6d}, {self.scheduler.get_last_lr()[0]:.7f}] {line}")
            self.running = {}


def train(args):
    model = nn.DataParallel(FlowNet(args), device_ids=args.gpus)
    print("Parameter Count: %d" % count_parameters(model))
    if args.restore_ckpt is not None:
        model.load_state_dict(torch.load(args.restore_ckpt), strict=False)
    model.cuda()
    model.train()

    train_loader = fetch_dataloader(args)
    optimizer, scheduler = fetch_optimizer(args, model)
    total_steps = 0
    scaler = GradScaler(enabled=args.mixed_precision)
    logger = Logger(scheduler)

    should_keep_training = True
    while should_keep_training:
        for i_batch, data_blob in enumerate(train_loader):
            optimizer.zero_grad()
            image1, image2, flow, valid = [x.cuda() for x in data_blob]
            if args.add_noise:
                stdv = np.random.uniform(0.0, 5.0)
                image1 = (image1 + stdv * torch.randn(*image1.shape).cuda()).clamp(0.0, 255.0)
                image2 = (image2 + stdv * torch.randn(*image2.shape).cuda()).clamp(0.0, 255.0)

            flow_predictions = model(image1, image2, iters=args.iters)
            loss, metrics = sequence_loss(flow_predictions, flow, valid, args.gamma)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)

            scaler.step(optimizer)
            scheduler.step()
            scaler.update()

            logger.push(metrics)
            if total_steps % VAL_FREQ == VAL_FREQ - 1:
                torch.save(model.state_dict(), "checkpoints/%d_%s.pth" % (total_steps + 1, args.name))
            total_steps += 1
            if total_steps > args.num_steps:
                should_keep_training = False
                break

    torch.save(model.state_dict(), "checkpoints/%s.pth" % args.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="raft")
    parser.add_argument("--data_root", default="datasets/FlyingChairs_release/data")
    parser.add_argument("--restore_ckpt")
    parser.add_argument("--lr", type=float, default=0.00002)
    parser.add_argument("--num_steps", type=int, default=100000)
    parser.add_argument("--batch_size", type=int, default=6)
    parser.add_argument("--image_size", type=int, nargs="+", default=[384, 512])
    parser.add_argument("--gpus", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--mixed_precision", action="store_true")
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--wdecay", type=float, default=0.00005)
    parser.add_argument("--epsilon", type=float, default=1e-8)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.8)
    parser.add_argument("--add_noise", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1234)
    np.random.seed(1234)
    os.makedirs("checkpoints", exist_ok=True)
    train(args)
