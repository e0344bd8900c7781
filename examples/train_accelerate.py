"""Accelerate: the precision is not in this script. It is in mp.yaml.

mpguard launch --config examples/mp_accelerate.yaml examples/train_accelerate.py --steps 20
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from gpt import GPT, loader, loss_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())

    wrapper = type(model).__name__
    accelerator.print(f"{accelerator.num_processes} process(es), {accelerator.distributed_type}, model is a {wrapper}")
    for step, batch in zip(range(1, options.steps + 1), data, strict=False):
        loss = loss_of(model(batch["input_ids"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, options.steps) or step % 20 == 0:
            accelerator.print(f"step {step:3}  loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
