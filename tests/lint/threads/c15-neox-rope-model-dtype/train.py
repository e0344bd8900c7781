import argparse

import deepspeed
import numpy as np
import torch
import yaml
from torch.utils.data import Dataset

from megatron.model import GPTNeoX


class TokenFile(Dataset):
    def __init__(self, path, seq):
        self.d, self.seq = np.memmap(path, dtype=np.uint16, mode="r"), seq

    def __len__(self):
        return (len(self.d) - 1) // self.seq

    def __getitem__(self, i):
        x = torch.from_numpy(self.d[i * self.seq: (i + 1) * self.seq + 1].astype(np.int64))
        return x[:-1], x[1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--conf", default="configs/410M.yml")
    ap.add_argument("--local_rank", type=int, default=0)
    args = ap.parse_args()
    cfg = yaml.safe_load(open(args.conf))
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler",
            "zero_optimization", "fp16", "bf16", "gradient_clipping")
    ds_config = {k: cfg[k] for k in keys if k in cfg}
    model = GPTNeoX(cfg)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config,
        training_data=TokenFile(cfg["data_path"], cfg["seq_length"]))
    step = 0
    while step < cfg["train_iters"]:
        for tokens, labels in loader:
            loss = engine(tokens.to(engine.device), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            step += 1
            if step % cfg["log_interval"] == 0 and engine.global_rank == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step % cfg["save_interval"] == 0:
                engine.save_checkpoint(cfg["save"])


if __name__ == "__main__":
    main()
