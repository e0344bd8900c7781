import math
import os

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import get_cosine_schedule_with_warmup


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum, self.count = 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


class Trainer:
    def __init__(self, args, model, train_loader, valid_loader):
        self.args = args
        self._accelerator = Accelerator(
            mixed_precision="fp16",
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            log_with=None,
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        steps = math.ceil(len(train_loader) / args.gradient_accumulation_steps) * args.epochs
        self.lr_scheduler = get_cosine_schedule_with_warmup(self.optimizer, int(0.1 * steps), steps)
        (self.model, self.optimizer, self.train_loader, self.valid_loader, self.lr_scheduler) = (
            self._accelerator.prepare(model, self.optimizer, train_loader, valid_loader, self.lr_scheduler)
        )
        self._trn_loss_meter = AverageMeter()
        self._val_loss_meter = AverageMeter()
        self.best = float("inf")

    def train_one_epoch(self, dataloader):
        self.model.train()
        self._trn_loss_meter.reset()
        for step, batch in enumerate(tqdm(dataloader, disable=not self._accelerator.is_main_process)):
            with self._accelerator.accumulate(self.model):
                self.optimizer.zero_grad()
                _, loss = self.model(**batch)
                self._accelerator.backward(loss)
                if self.args.max_grad_norm is not None:
                    self._accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                self.optimizer.step()
                self.lr_scheduler.step()
            self._trn_loss_meter.update(loss.item(), batch["label"].size(0))
        return self._trn_loss_meter.avg

    @torch.no_grad()
    def evaluate(self, dataloader):
        self.model.eval()
        self._val_loss_meter.reset()
        for batch in dataloader:
            _, loss = self.model(**batch)
            self._val_loss_meter.update(self._accelerator.gather(loss).mean().item(), batch["label"].size(0))
        return self._val_loss_meter.avg

    def fit(self):
        for epoch in range(self.args.epochs):
            trn = self.train_one_epoch(self.train_loader)
            val = self.evaluate(self.valid_loader)
            self._accelerator.print(f"epoch {epoch} train {trn:.4f} valid {val:.4f}")
            if val < self.best:
                self.best = val
                self._accelerator.wait_for_everyone()
                unwrapped = self._accelerator.unwrap_model(self.model)
                self._accelerator.save(
                    unwrapped.state_dict(), os.path.join(self.args.output_dir, "best_model.pth")
                )
