import os

import torch
import torch.nn.functional as F
import torch.optim as optim
from tqdm import tqdm

from .networks import ChangeFormerLite


class CDTrainer:
    def __init__(self, args, dataloaders):
        self.args, self.dataloaders, self.device = args, dataloaders, args.device
        self.net_G = ChangeFormerLite(args.embed_dim, args.n_class).to(self.device)
        if args.optimizer == "sgd":
            self.optimizer_G = optim.SGD(self.net_G.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
        elif args.optimizer == "adam":
            self.optimizer_G = optim.Adam(self.net_G.parameters(), lr=args.lr)
        else:
            self.optimizer_G = optim.AdamW(self.net_G.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=0.01)
        self.exp_lr_scheduler_G = optim.lr_scheduler.LambdaLR(self.optimizer_G, lambda e: 1 - e / (args.max_epochs + 1))
        self.best = 0.0

    def _forward_pass(self, batch):
        self.pred = self.net_G(batch["A"].to(self.device), batch["B"].to(self.device))
        self.gt = batch["L"].to(self.device)

    def train_models(self):
        for epoch in range(self.args.max_epochs):
            self.net_G.train()
            for batch in tqdm(self.dataloaders["train"]):
                self._forward_pass(batch)
                self.optimizer_G.zero_grad()
                self.G_loss = F.cross_entropy(self.pred, self.gt)
                self.G_loss.backward()
                self.optimizer_G.step()
            self.exp_lr_scheduler_G.step()
            acc = self.validate()
            print(f"Is_training: True. [{epoch},{self.args.max_epochs}] G_loss: {self.G_loss.item():.5f}, val acc: {acc:.5f}")
            if acc >= self.best:
                self.best = acc
                torch.save({"epoch": epoch, "model_G_state_dict": self.net_G.state_dict(),
                            "optimizer_G_state_dict": self.optimizer_G.state_dict()},
                           os.path.join(self.args.checkpoint_dir, "best_ckpt.pt"))

    @torch.no_grad()
    def validate(self):
        self.net_G.eval()
        ok = n = 0
        for batch in self.dataloaders["val"]:
            self._forward_pass(batch)
            ok += (self.pred.argmax(1) == self.gt).sum().item()
            n += self.gt.numel()
        return ok / max(n, 1)
