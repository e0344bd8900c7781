import sys

import yaml
from torch.utils.data import DataLoader

from engine.grid import GridData, GridDetector, criterion
from engine.trainer import BaseTrainer


def main():
    with open("default.yaml") as f:
        args = yaml.safe_load(f)
    for kv in sys.argv[1:]:
        k, v = kv.split("=", 1)
        args[k] = yaml.safe_load(v)
    train = DataLoader(GridData(args["data"], "train"), args["batch"], shuffle=True, num_workers=8, pin_memory=True, drop_last=True)
    val = DataLoader(GridData(args["data"], "val"), args["batch"] * 2, num_workers=8)
    BaseTrainer(args, GridDetector(), train, val, criterion).train()


if __name__ == "__main__":
    main()
