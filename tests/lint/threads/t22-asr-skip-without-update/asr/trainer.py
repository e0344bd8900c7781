import logging

import torch
from torch.cuda.amp import GradScaler, autocast


class Trainer:
    def __init__(self, model, optimizer, scheduler, cfg):
        self.model, self.optimizer, self.scheduler, self.cfg = model, optimizer, scheduler, cfg
        self.scaler = GradScaler() if cfg["use_amp"] else None

    def train_one_epoch(self, loader):
        model, scaler, cfg = self.model, self.scaler, self.cfg
        model.train()
        all_steps_are_invalid = True
        for iiter, batch in enumerate(loader, 1):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            with autocast(scaler is not None):
                loss = model(**batch)
                loss = loss / cfg["accum_grad"]

            if scaler is not None:
                scaler.scale(loss).backward()
            else:
                loss.backward()

            if iiter % cfg["accum_grad"] == 0:
                if scaler is not None:
                    scaler.unscale_(self.optimizer)
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg["grad_clip"])
                if not torch.isfinite(grad_norm):
                    logging.warning(f"The grad norm is {grad_norm}. Skipping updating the model.")
                else:
                    all_steps_are_invalid = False
                    if scaler is not None:
                        scaler.step(self.optimizer)
                        scaler.update()
                    else:
                        self.optimizer.step()
                    self.scheduler.step()
                self.optimizer.zero_grad()
            if iiter % 100 == 0:
                logging.info(f"{iiter} loss={loss.item() * cfg['accum_grad']:.4f}")
        return all_steps_are_invalid
