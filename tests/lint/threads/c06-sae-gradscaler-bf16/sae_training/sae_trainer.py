import contextlib
from dataclasses import dataclass

import torch
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm


@dataclass
class SAETrainerConfig:
    total_training_samples: int = 20_000_000
    train_batch_size: int = 4096
    lr: float = 3e-4
    lr_warm_up_steps: int = 500
    autocast: bool = True
    device: str = "cuda"
    save_path: str = "sae.pt"


class SAETrainer:
    def __init__(self, cfg: SAETrainerConfig, sae, data_provider):
        self.cfg, self.sae, self.data_provider = cfg, sae, data_provider
        self.optimizer = Adam(sae.parameters(), lr=cfg.lr, betas=(0.9, 0.999))
        self.lr_scheduler = LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / cfg.lr_warm_up_steps))
        self.grad_scaler = torch.amp.GradScaler(device=cfg.device, enabled=cfg.autocast)
        if cfg.autocast:
            self.autocast_if_enabled = torch.autocast(device_type=cfg.device, dtype=torch.bfloat16,
                                                      enabled=cfg.autocast)
        else:
            self.autocast_if_enabled = contextlib.nullcontext()
        self.n_samples = 0

    def _train_step(self, acts):
        self.sae.train()
        with self.autocast_if_enabled:
            recon = self.sae(acts)
            loss = (recon - acts).pow(2).sum(-1).mean()
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.sae.parameters(), 1.0)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        return loss.detach()

    def fit(self):
        bar = tqdm(total=self.cfg.total_training_samples)
        while self.n_samples < self.cfg.total_training_samples:
            batch = next(self.data_provider).to(self.cfg.device)
            loss = self._train_step(batch.to(self.sae.W_enc.dtype))
            self.n_samples += len(batch)
            bar.update(len(batch))
            bar.set_description(f"mse {loss.item():.3f}")
        torch.save(self.sae.state_dict(), self.cfg.save_path)
        return self.sae
