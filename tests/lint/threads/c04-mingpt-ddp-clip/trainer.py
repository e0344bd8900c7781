import os
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional

import fsspec
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int = 10
    batch_size: int = 216
    data_loader_workers: int = 4
    grad_norm_clip: float = 1.0
    snapshot_path: Optional[str] = "snapshot.pt"
    save_every: int = 3
    use_amp: bool = True


@dataclass
class Snapshot:
    model_state: "OrderedDict[str, torch.Tensor]"
    optimizer_state: Dict[str, Any]
    finished_epoch: int


class Trainer:
    def __init__(self, config: TrainerConfig, model, optimizer, train_dataset: Dataset, test_dataset=None):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.test_loader = self._prepare_dataloader(test_dataset) if test_dataset else None
        self.epochs_run = 0
        self.model = model.to(self.local_rank)
        self.optimizer = optimizer
        self.save_every = config.save_every
        if config.use_amp:
            self.scaler = torch.cuda.amp.GradScaler()
        self._load_snapshot()
        self.model = DDP(self.model, device_ids=[self.local_rank])

    def _prepare_dataloader(self, dataset):
        return DataLoader(dataset, batch_size=self.config.batch_size, pin_memory=True, shuffle=False,
                          num_workers=self.config.data_loader_workers, sampler=DistributedSampler(dataset))

    def _load_snapshot(self):
        try:
            with fsspec.open(self.config.snapshot_path) as f:
                data = torch.load(f, map_location="cpu", weights_only=False)
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
            return
        snapshot = Snapshot(**data)
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch

    def _run_batch(self, source, targets, train: bool = True) -> float:
        with torch.set_grad_enabled(train), torch.amp.autocast(
                device_type="cuda", dtype=torch.float16, enabled=self.config.use_amp):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            if self.config.use_amp:
                self.scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
                self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch, dataloader, train=True):
        dataloader.sampler.set_epoch(epoch)
        for it, (source, targets) in enumerate(dataloader):
            loss = self._run_batch(source.to(self.local_rank), targets.to(self.local_rank), train)
            if it % 100 == 0:
                print(f"[GPU{self.global_rank}] Epoch {epoch} | Iter {it} | "
                      f"{'Train' if train else 'Eval'} Loss {loss:.5f}")

    def _save_snapshot(self, epoch):
        raw = self.model.module if hasattr(self.model, "module") else self.model
        snap = Snapshot(raw.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snap), self.config.snapshot_path)

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            epoch += 1
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)
            if self.test_loader:
                self._run_epoch(epoch, self.test_loader, train=False)
