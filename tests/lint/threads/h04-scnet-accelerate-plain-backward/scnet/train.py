import argparse
from pathlib import Path

import torch
import yaml
from ml_collections import ConfigDict
from torch.utils.data import DataLoader

from .SCNet import SCNet
from .solver import Solver
from .wav import get_wav_datasets


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_path", default="./result/")
    parser.add_argument("--config_path", default="./conf/config.yaml")
    args = parser.parse_args()
    Path(args.save_path).mkdir(exist_ok=True, parents=True)
    with open(args.config_path) as f:
        config = ConfigDict(yaml.safe_load(f))
    torch.manual_seed(config.seed)

    model = SCNet(**config.model)
    train_set, valid_set = get_wav_datasets(config.data)
    loaders = {
        "train": DataLoader(train_set, batch_size=config.batch_size, shuffle=True, num_workers=4, drop_last=True),
        "valid": DataLoader(valid_set, batch_size=1, num_workers=4),
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optim.lr, weight_decay=config.optim.decay)
    Solver(loaders, model, optimizer, config, args).train()


if __name__ == "__main__":
    main()
