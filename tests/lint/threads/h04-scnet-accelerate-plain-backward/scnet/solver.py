import os
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm

from . import augment
from .ema import ModelEMA
from .loss import spec_rmse_loss


class Solver:
    def __init__(self, loaders, model, optimizer, config, args):
        self.config = config
        self.loaders = loaders
        self.accelerator = Accelerator()
        self.model, self.optimizer, self.loaders["train"], self.loaders["valid"] = self.accelerator.prepare(
            model, optimizer, loaders["train"], loaders["valid"]
        )
        self.device = self.accelerator.device
        self.augment = torch.nn.Sequential(
            augment.Shift(shift=int(config.data.samplerate * config.data.shift)),
            augment.FlipChannels(),
            augment.FlipSign(),
        ).to(self.device)
        self.emas = [ModelEMA(self.accelerator.unwrap_model(self.model), d) for d in config.ema.epoch]
        self.stft_config = {
            "n_fft": config.model.nfft,
            "hop_length": config.model.hop_size,
            "win_length": config.model.win_size,
            "center": True,
            "normalized": config.model.normalized,
        }
        self.checkpoint_file = Path(args.save_path) / "checkpoint.th"
        self.best_loss = float("inf")
        self.start_epoch = 0
        self._reset()

    def _serialize(self, epoch):
        package = {
            "state": self.accelerator.unwrap_model(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best_loss": self.best_loss,
            "epoch": epoch,
        }
        self.accelerator.save(package, self.checkpoint_file)

    def _reset(self):
        if self.checkpoint_file.exists():
            package = torch.load(self.checkpoint_file, map_location="cpu")
            self.accelerator.unwrap_model(self.model).load_state_dict(package["state"])
            self.optimizer.load_state_dict(package["optimizer"])
            self.best_loss = package["best_loss"]
            self.start_epoch = package["epoch"] + 1

    def train(self):
        for epoch in range(self.start_epoch, self.config.epochs):
            self.model.train()
            train_loss = self._run_one_epoch(epoch)
            self.model.eval()
            with torch.no_grad():
                valid_loss = self._run_one_epoch(epoch, train=False)
            self.accelerator.print(f"epoch {epoch}: train {train_loss:.4f} valid {valid_loss:.4f}")
            self.best_loss = min(self.best_loss, valid_loss)
            if self.accelerator.is_main_process:
                self._serialize(epoch)

    def _run_one_epoch(self, epoch, train=True):
        loader = self.loaders["train"] if train else self.loaders["valid"]
        total, count = 0.0, 0
        for sources in tqdm(loader, disable=not self.accelerator.is_main_process):
            sources = sources.to(self.device)
            if train:
                sources = self.augment(sources)
            mix = sources.sum(dim=1)
            estimate = self.model(mix)
            assert estimate.shape == sources.shape, (estimate.shape, sources.shape)
            loss = spec_rmse_loss(estimate, sources, self.stft_config)
            if train:
                loss.backward()
                grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
                for ema in self.emas:
                    ema.update()
            total += loss.item()
            count += 1
        return total / max(1, count)
