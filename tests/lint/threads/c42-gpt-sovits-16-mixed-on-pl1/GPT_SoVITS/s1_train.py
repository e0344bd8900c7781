import argparse
import logging
import os
from collections import OrderedDict
from pathlib import Path

import torch
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy

from AR.data_module import Text2SemanticDataModule
from AR.t2s_lightning_module import Text2SemanticLightningModule
from utils.io import load_yaml_config

logging.getLogger("numba").setLevel(logging.WARNING)
torch.set_float32_matmul_precision("high")


class my_model_ckpt(ModelCheckpoint):
    def __init__(self, config, if_save_latest, if_save_every_weights, half_weights_save_dir, exp_name, **kwargs):
        super().__init__(**kwargs)
        self.if_save_latest = if_save_latest
        self.if_save_every_weights = if_save_every_weights
        self.half_weights_save_dir = half_weights_save_dir
        self.exp_name = exp_name
        self.config = config

    def on_train_epoch_end(self, trainer, pl_module):
        if self._should_save_on_train_epoch_end(trainer):
            if self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
                if self.if_save_latest:
                    to_clean = list(os.listdir(self.dirpath))
                self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
                if self.if_save_latest:
                    for name in to_clean:
                        os.remove(f"{self.dirpath}/{name}")
                if self.if_save_every_weights:
                    weight = OrderedDict((k, v.half()) for k, v in trainer.strategy._lightning_module.state_dict().items())
                    torch.save({"weight": weight, "config": self.config, "info": f"GPT-e{trainer.current_epoch + 1}"},
                               f"{self.half_weights_save_dir}/{self.exp_name}-e{trainer.current_epoch + 1}.ckpt")
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))


def main(args):
    config = load_yaml_config(args.config_file)
    output_dir = Path(config["output_dir"])
    output_dir.mkdir(parents=True, exist_ok=True)
    ckpt_dir = output_dir / "ckpt"
    ckpt_dir.mkdir(parents=True, exist_ok=True)
    seed_everything(config["train"]["seed"], workers=True)
    ckpt_callback = my_model_ckpt(
        config=config,
        if_save_latest=config["train"]["if_save_latest"],
        if_save_every_weights=config["train"]["if_save_every_weights"],
        half_weights_save_dir=config["train"]["half_weights_save_dir"],
        exp_name=config["train"]["exp_name"],
        save_top_k=-1,
        monitor="top_3_acc",
        mode="max",
        save_on_train_epoch_end=True,
        every_n_epochs=config["train"]["save_every_n_epoch"],
        dirpath=ckpt_dir,
    )
    logger = TensorBoardLogger(name=output_dir.stem, save_dir=output_dir)
    trainer: Trainer = Trainer(
        max_epochs=config["train"]["epochs"],
        accelerator="gpu",
        limit_val_batches=0,
        devices=-1,
        benchmark=False,
        fast_dev_run=False,
        strategy=DDPStrategy(process_group_backend="nccl"),
        precision=config["train"]["precision"],
        logger=logger,
        num_sanity_val_steps=0,
        callbacks=[ckpt_callback],
    )
    model = Text2SemanticLightningModule(config, output_dir)
    data_module = Text2SemanticDataModule(config, train_semantic_path=config["train_semantic_path"],
                                          train_phoneme_path=config["train_phoneme_path"])
    existing = sorted(p.name for p in ckpt_dir.glob("*.ckpt"))
    trainer.fit(model, data_module, ckpt_path=str(ckpt_dir / existing[-1]) if existing else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", "--config_file", type=str, default="configs/s1longer.yaml")
    main(parser.parse_args())
