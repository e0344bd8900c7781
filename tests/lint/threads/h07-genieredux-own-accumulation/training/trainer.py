from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.utils.data import DataLoader
from tqdm import tqdm


def cycle(dl):
    while True:
        for data in dl:
            yield data


def accum_log(log, new_logs):
    for key, value in new_logs.items():
        log[key] = log.get(key, 0.0) + value
    return log


class Trainer:
    def __init__(self, model, config, dataset, valid_dataset):
        self.config = config
        kwargs = DistributedDataParallelKwargs(find_unused_parameters=config.find_unused)
        self.accelerator = Accelerator(mixed_precision=config.mixed_precision, kwargs_handlers=[kwargs])
        self.grad_accum_every = config.grad_accum
        self.max_grad_norm = config.max_grad_norm
        self.num_train_steps = config.num_train_steps
        self.results_folder = Path(config.results_folder)
        self.results_folder.mkdir(parents=True, exist_ok=True)

        self.model = model
        self.optim = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.wd)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optim, lambda s: min(1.0, (s + 1) / config.warmup_steps)
        )
        self.dl = DataLoader(dataset, batch_size=config.batch_size, shuffle=True, num_workers=config.num_workers)
        self.valid_dl = DataLoader(valid_dataset, batch_size=config.batch_size, num_workers=config.num_workers)
        self.model, self.optim, self.scheduler, self.dl, self.valid_dl = self.accelerator.prepare(
            self.model, self.optim, self.scheduler, self.dl, self.valid_dl
        )
        self.dl_iter = cycle(self.dl)
        self.valid_dl_iter = cycle(self.valid_dl)
        self.steps = 0

    @property
    def device(self):
        return self.accelerator.device

    def save(self):
        if not self.accelerator.is_local_main_process:
            return
        pkg = dict(
            model=self.accelerator.get_state_dict(self.model), optim=self.optim.state_dict(), steps=self.steps
        )
        torch.save(pkg, self.results_folder / f"model-{self.steps}.pt")

    def train_step(self):
        self.model.train()
        logs = {}
        for _ in range(self.grad_accum_every):
            videos, actions = next(self.dl_iter)
            with self.accelerator.autocast():
                loss = self.model(videos, actions=actions)
            self.accelerator.backward(loss / self.grad_accum_every)
            if self.max_grad_norm is not None:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            accum_log(logs, {"loss": loss.item() / self.grad_accum_every})
        self.optim.step()
        self.scheduler.step()
        self.optim.zero_grad()

        if self.steps % self.config.validate_every == 0:
            self.model.eval()
            with torch.no_grad():
                videos, actions = next(self.valid_dl_iter)
                logs["valid_loss"] = self.model(videos, actions=actions).item()
        if self.steps and self.steps % self.config.save_every == 0:
            self.accelerator.wait_for_everyone()
            self.save()
        self.steps += 1
        return logs

    def train(self):
        bar = tqdm(range(self.num_train_steps), disable=not self.accelerator.is_local_main_process)
        for _ in bar:
            logs = self.train_step()
            bar.set_postfix(**{k: f"{v:.4f}" for k, v in logs.items()})
        self.accelerator.print("training complete")
