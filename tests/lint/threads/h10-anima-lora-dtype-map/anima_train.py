import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml
from torch.utils.data import DataLoader, Dataset

from modules.lora import LoRANetwork
from phases.bootstrap import bootstrap, load_transformer
from phases.train_loop import run


class CachedLatents(Dataset):
    def __init__(self, root):
        self.files = sorted(Path(root).glob("*.pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return torch.load(self.files[i], map_location="cpu")


def main():
    with open(sys.argv[1]) as f:
        args = SimpleNamespace(**yaml.safe_load(f))
    ctx = SimpleNamespace(log=print)
    bootstrap(ctx, args)
    model = load_transformer(ctx, args)
    lora = LoRANetwork(model, args.lora_rank, args.lora_alpha).to(ctx.device)
    model.train()
    loader = DataLoader(CachedLatents(args.data_dir), batch_size=args.batch_size, shuffle=True, num_workers=2)
    run(ctx, args, model, lora, loader)


if __name__ == "__main__":
    main()
