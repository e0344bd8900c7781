import argparse

import torch
from torch.utils.data import DataLoader

from dataset import WatermarkPairs
from slbr.trainer import Trainer


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--base-dir", default="data/10kgray")
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--train-batch", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--lambda-l1", type=float, default=2.0)
    p.add_argument("--lambda-mask", type=float, default=1.0)
    p.add_argument("--lambda-primary", type=float, default=0.01)
    p.add_argument("--checkpoint", default="checkpoint/slbr")
    return p.parse_args()


def main():
    args = get_args()
    device = torch.device("cuda")
    train_loader = DataLoader(WatermarkPairs(args.base_dir, "train"), batch_size=args.train_batch,
                              shuffle=True, num_workers=8, pin_memory=True)
    val_loader = DataLoader(WatermarkPairs(args.base_dir, "test"), batch_size=1, num_workers=4)
    trainer = Trainer(args, train_loader, val_loader, device)
    for epoch in range(args.epochs):
        trainer.train(epoch)
        trainer.validate(epoch)
        trainer.save_checkpoint(epoch)


if __name__ == "__main__":
    main()
