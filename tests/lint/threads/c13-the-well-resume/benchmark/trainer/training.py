import logging
import os
import time

import torch
import tqdm
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)


class Trainer:
    def __init__(self, checkpoint_folder, model, datamodule, optimizer, loss_fn, epochs, checkpoint_frequency,
                 val_frequency, device, lr_scheduler=None, is_distributed=False, enable_amp=False,
                 amp_type="float16", checkpoint_path=""):
        self.device = device
        self.model = model
        self.datamodule = datamodule
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.loss_fn = loss_fn
        self.max_epoch = epochs
        self.checkpoint_frequency = checkpoint_frequency
        self.val_frequency = val_frequency
        self.checkpoint_folder = checkpoint_folder
        self.is_distributed = is_distributed
        self.starting_epoch = 1
        self.starting_val_loss = float("inf")
        self.enable_amp = enable_amp
        self.amp_type = torch.bfloat16 if amp_type == "bfloat16" else torch.float16
        self.grad_scaler = torch.GradScaler(self.device.type, enabled=enable_amp and amp_type != "bfloat16")
        if checkpoint_path:
            self.load_checkpoint(checkpoint_path)

    def save_model(self, epoch, validation_loss, output_path):
        torch.save(
            {
                "epoch": epoch,
                "model_state_dict": self.model.state_dict(),
                "optimizer_state_dit": self.optimizer.state_dict(),
                "validation_loss": validation_loss,
            },
            output_path,
        )

    def load_checkpoint(self, checkpoint_path):
        checkpoint = torch.load(checkpoint_path, weights_only=False)
        if self.model is not None:
            self.model.load_state_dict(checkpoint["model_state_dict"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(checkpoint["optimizer_state_dit"])
        self.starting_epoch = checkpoint["epoch"] + 1
        self.starting_val_loss = checkpoint["validation_loss"]

    def rollout_model(self, model, batch):
        return model(batch["input_fields"].to(self.device)), batch["output_fields"].to(self.device)

    def train_one_epoch(self, epoch, dataloader):
        self.model.train()
        epoch_loss, start = 0.0, time.time()
        for i, batch in enumerate(tqdm.tqdm(dataloader)):
            with torch.autocast(self.device.type, enabled=self.enable_amp, dtype=self.amp_type):
                y_pred, y_ref = self.rollout_model(self.model, batch)
                loss = self.loss_fn(y_pred, y_ref).mean()
            self.grad_scaler.scale(loss).backward()
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
            self.optimizer.zero_grad()
            epoch_loss += loss.item() / len(dataloader)
            logger.info("Epoch %d, Batch %d/%d: loss %.5f scale %s", epoch, i + 1, len(dataloader), loss.item(),
                        self.grad_scaler.get_scale())
        if self.lr_scheduler:
            self.lr_scheduler.step()
        return epoch_loss, time.time() - start

    @torch.inference_mode()
    def validation_loop(self, dataloader):
        self.model.eval()
        total = 0.0
        for batch in dataloader:
            with torch.autocast(self.device.type, enabled=self.enable_amp, dtype=self.amp_type):
                y_pred, y_ref = self.rollout_model(self.model, batch)
            total += self.loss_fn(y_pred.float(), y_ref).mean().item() / len(dataloader)
        return total

    def train(self):
        best = self.starting_val_loss
        train_loader, val_loader = self.datamodule.train_dataloader(), self.datamodule.val_dataloader()
        for epoch in range(self.starting_epoch, self.max_epoch + 1):
            if self.is_distributed:
                train_loader.sampler.set_epoch(epoch)
            loss, secs = self.train_one_epoch(epoch, train_loader)
            logger.info("Epoch %d/%d: avg training loss %.5f (%.0fs)", epoch, self.max_epoch, loss, secs)
            self.save_model(epoch, best, os.path.join(self.checkpoint_folder, "recent.pt"))
            if epoch % self.val_frequency == 0:
                val = self.validation_loop(val_loader)
                if val < best:
                    best = val
                    self.save_model(epoch, val, os.path.join(self.checkpoint_folder, "best.pt"))
            if epoch % self.checkpoint_frequency == 0:
                self.save_model(epoch, best, os.path.join(self.checkpoint_folder, f"checkpoint_{epoch}.pt"))
