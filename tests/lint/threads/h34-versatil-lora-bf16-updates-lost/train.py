import sys

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from transformers import AutoProcessor

from versatil.data import make_loader
from versatil.policy import OpenVLAPolicy


def main():
    cfg = OmegaConf.load(sys.argv[1])
    L.seed_everything(cfg.seed)
    processor = AutoProcessor.from_pretrained(cfg.model.name, trust_remote_code=True)
    loader = make_loader(cfg.data.root, processor, cfg.data.batch_size, cfg.data.workers)
    trainer = L.Trainer(
        accelerator="gpu", devices=cfg.trainer.devices, precision=cfg.model.model_dtype,
        max_steps=cfg.trainer.max_steps, gradient_clip_val=1.0, log_every_n_steps=20,
        callbacks=[ModelCheckpoint(every_n_train_steps=5000, save_top_k=-1)],
    )
    trainer.fit(OpenVLAPolicy(cfg), loader)


if __name__ == "__main__":
    main()
