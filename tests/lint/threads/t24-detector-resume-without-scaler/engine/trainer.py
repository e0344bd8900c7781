import math
import os
from copy import deepcopy
from datetime import datetime

import torch
from torch import optim


class ModelEMA:
    def __init__(self, model, decay=0.9999, tau=2000, updates=0):
        self.ema = deepcopy(model).eval()
        self.updates = updates
        self.decay = lambda x: decay * (1 - math.exp(-x / tau))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        self.updates += 1
        d = self.decay(self.updates)
        msd = model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * msd[k].detach()


class BaseTrainer:
    def __init__(self, args, model, train_loader, val_loader, criterion):
        self.args = args
        self.device = torch.device("cuda")
        self.model = model.to(self.device)
        self.train_loader, self.val_loader = train_loader, val_loader
        self.criterion = criterion
        self.wdir = os.path.join(args["save_dir"], "weights")
        os.makedirs(self.wdir, exist_ok=True)
        self.last, self.best = os.path.join(self.wdir, "last.pt"), os.path.join(self.wdir, "best.pt")
        self.epochs = args["epochs"]
        self.start_epoch, self.best_fitness = 0, None

    def _setup_train(self):
        self.amp = bool(self.args["amp"])
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp)
        self.accumulate = max(round(self.args["nbs"] / self.args["batch"]), 1)
        self.optimizer = self.build_optimizer(self.model, self.args["lr0"], self.args["momentum"], self.args["weight_decay"])
        self.lf = lambda x: max(1 - x / self.epochs, 0) * (1.0 - self.args["lrf"]) + self.args["lrf"]
        self.scheduler = optim.lr_scheduler.LambdaLR(self.optimizer, lr_lambda=self.lf)
        self.ema = ModelEMA(self.model)
        if self.args["resume"]:
            self.resume_training(torch.load(self.last, map_location="cpu", weights_only=False))
        self.scheduler.last_epoch = self.start_epoch - 1

    def build_optimizer(self, model, lr, momentum, decay):
        g = [], [], []
        for m in model.modules():
            for name, p in m.named_parameters(recurse=False):
                if "bias" in name:
                    g[2].append(p)
                elif isinstance(m, torch.nn.BatchNorm2d):
                    g[1].append(p)
                else:
                    g[0].append(p)
        opt = optim.SGD(g[2], lr=lr, momentum=momentum, nesterov=True)
        opt.add_param_group({"params": g[0], "weight_decay": decay})
        opt.add_param_group({"params": g[1], "weight_decay": 0.0})
        return opt

    def train(self):
        self._setup_train()
        ni = self.start_epoch * len(self.train_loader)
        last_opt_step = ni - 1
        for epoch in range(self.start_epoch, self.epochs):
            self.epoch = epoch
            self.model.train()
            self.optimizer.zero_grad()
            for imgs, targets in self.train_loader:
                imgs, targets = imgs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
                with torch.amp.autocast("cuda", enabled=self.amp):
                    self.loss = self.criterion(self.model(imgs), targets)
                self.scaler.scale(self.loss).backward()
                if ni - last_opt_step >= self.accumulate:
                    self.optimizer_step()
                    last_opt_step = ni
                ni += 1
            self.scheduler.step()
            self.fitness = self.validate()
            if self.best_fitness is None or self.fitness > self.best_fitness:
                self.best_fitness = self.fitness
            self.save_model()
            print(f"{epoch + 1}/{self.epochs} loss {self.loss.item():.4f} fitness {self.fitness:.4f} scale {self.scaler.get_scale():.0f}")

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.ema.update(self.model)

    def save_model(self):
        ckpt = {
            "epoch": self.epoch,
            "best_fitness": self.best_fitness,
            "model": deepcopy(self.model).state_dict(),
            "ema": self.ema.ema.state_dict(),
            "updates": self.ema.updates,
            "optimizer": self.optimizer.state_dict(),
            "train_args": self.args,
            "date": datetime.now().isoformat(),
        }
        torch.save(ckpt, self.last)
        if self.best_fitness == self.fitness:
            torch.save(ckpt, self.best)

    def resume_training(self, ckpt):
        self.start_epoch = ckpt["epoch"] + 1
        self.model.load_state_dict(ckpt["model"])
        self.optimizer.load_state_dict(ckpt["optimizer"])
        self.best_fitness = ckpt["best_fitness"]
        self.ema.ema.load_state_dict(ckpt["ema"])
        self.ema.updates = ckpt["updates"]
        print(f"Resuming training from epoch {self.start_epoch + 1} to {self.epochs} total epochs")

    @torch.no_grad()
    def validate(self):
        self.ema.ema.eval()
        total = 0.0
        for imgs, targets in self.val_loader:
            with torch.amp.autocast("cuda", enabled=self.amp):
                total += self.criterion(self.ema.ema(imgs.to(self.device)), targets.to(self.device)).item()
        return -total / max(len(self.val_loader), 1)
