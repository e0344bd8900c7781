import os

import torch
from torch.cuda.amp import GradScaler, autocast

from .losses import Losses
from .nets import SLBRNet


class Trainer:
    def __init__(self, args, train_loader, val_loader, device):
        self.args = args
        self.device = device
        self.train_loader, self.val_loader = train_loader, val_loader
        self.model = SLBRNet().to(device)
        self.loss = Losses(args)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr, betas=(0.9, 0.999))
        self.scaler = GradScaler()

    def norm(self, x):
        return x * 2 - 1

    def train(self, epoch):
        self.model.train()
        for i, batch in enumerate(self.train_loader):
            inputs = batch["image"].to(self.device, non_blocking=True)
            target = batch["target"].to(self.device, non_blocking=True)
            mask = batch["mask"].to(self.device, non_blocking=True)
            self.optimizer.zero_grad()
            with autocast():
                ims, masks = self.model(self.norm(inputs))
                pixel_loss, mask_loss = self.loss(ims, self.norm(target), masks, mask)
                total_loss = self.args.lambda_l1 * pixel_loss + self.args.lambda_mask * mask_loss
            self.scaler.scale(total_loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if i % 100 == 0:
                print(f"{epoch} {i} pixel {pixel_loss.item():.4f} mask {mask_loss.item():.4f}")

    @torch.no_grad()
    def validate(self, epoch):
        self.model.eval()
        err = 0.0
        for batch in self.val_loader:
            ims, masks = self.model(self.norm(batch["image"].to(self.device)))
            err += (ims[0] - self.norm(batch["target"].to(self.device))).abs().mean().item()
        print(f"val {epoch} l1 {err / len(self.val_loader):.4f}")

    def save_checkpoint(self, epoch):
        os.makedirs(self.args.checkpoint, exist_ok=True)
        torch.save({"epoch": epoch, "state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "scaler": self.scaler.state_dict()}, os.path.join(self.args.checkpoint, "latest.pth"))
