import argparse
import logging
import os

import torch
import yaml

from data import DataModule
from model import UNetClassic
from trainer.training import Trainer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", default="configs/unet_turbulent.yaml")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    cfg = yaml.safe_load(open(args.config))
    logging.basicConfig(level=logging.INFO)
    os.makedirs(cfg["checkpoint_folder"], exist_ok=True)
    device = torch.device("cuda")
    model = UNetClassic(cfg["n_in"] * cfg["fields"], cfg["fields"]).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, cfg["epochs"])
    Trainer(cfg["checkpoint_folder"], model, DataModule(cfg["data"], cfg["batch_size"]), opt,
            torch.nn.MSELoss(), cfg["epochs"], 5, 1, device, sched, enable_amp=cfg["enable_amp"],
            amp_type=cfg["amp_type"], checkpoint_path=args.resume).train()


if __name__ == "__main__":
    main()
