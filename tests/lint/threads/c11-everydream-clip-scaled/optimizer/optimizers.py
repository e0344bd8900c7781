import itertools
import json
import logging

import torch
from torch.cuda.amp import GradScaler
from transformers import get_scheduler


class EveryDreamOptimizer:
    def __init__(self, args, optimizer_config, text_encoder, unet, epoch_len):
        del optimizer_config["doc"]
        self.grad_accum = args.grad_accum
        self.clip_grad_norm = args.clip_grad_norm
        self.text_encoder_params = list(text_encoder.parameters())
        self.unet_params = list(unet.parameters())
        self.epoch_len = epoch_len

        self.optimizer_te = self._create("text encoder", optimizer_config["text_encoder_overrides"],
                                         optimizer_config["base"], self.text_encoder_params)
        self.optimizer_unet = self._create("unet", {}, optimizer_config["base"], self.unet_params)
        self.optimizers = [o for o in (self.optimizer_te, self.optimizer_unet) if o is not None]
        self.lr_schedulers = [
            get_scheduler(args.lr_scheduler, optimizer=o, num_warmup_steps=args.lr_warmup_steps,
                          num_training_steps=args.max_epochs * epoch_len // args.grad_accum)
            for o in self.optimizers
        ]
        self.scaler = GradScaler(enabled=not args.disable_amp, init_scale=2 ** 17.5, growth_factor=2,
                                 backoff_factor=1.0 / 2, growth_interval=25) if args.amp else None
        logging.info(" Grad scaler enabled: %s (amp mode)", self.scaler is not None)

    def _create(self, label, overrides, base, params):
        cfg = {**base, **{k: v for k, v in overrides.items() if v is not None}}
        if cfg["lr"] == 0:
            return None
        return torch.optim.AdamW(itertools.chain(params), lr=cfg["lr"], betas=tuple(cfg["betas"]),
                                 eps=cfg["epsilon"], weight_decay=cfg["weight_decay"])

    def step(self, loss, step, global_step):
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

        if ((global_step + 1) % self.grad_accum == 0) or (step == self.epoch_len - 1):
            if self.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters=self.unet_params, max_norm=self.clip_grad_norm)
                torch.nn.utils.clip_grad_norm_(parameters=self.text_encoder_params, max_norm=self.clip_grad_norm)
            for optimizer in self.optimizers:
                if self.scaler is not None:
                    self.scaler.step(optimizer)
                else:
                    optimizer.step()
            if self.scaler is not None:
                self.scaler.update()
            self._zero_grad(set_to_none=True)
        for s in self.lr_schedulers:
            s.step()

    def _zero_grad(self, set_to_none=False):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def get_scale(self):
        return self.scaler.get_scale() if self.scaler else 1.0


def load_optimizer_config(path):
    with open(path) as f:
        return json.load(f)
