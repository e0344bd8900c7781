"""FSDP2 without a framework around it: the dtypes of shards, all-gather and reduction come from the policy.

    torchrun --nproc_per_node 2 -m mpguard.run --config examples/mp_fsdp2.yaml examples/train_fsdp2.py

Runs on the CPU too (gloo).
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from gpt import GPT, batches, loss_of
from torch.distributed.fsdp import fully_shard

import mpguard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    policy = mpguard.activate()  # the policy of mp.yaml
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = GPT().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy.to("fsdp2"))
    fully_shard(model, mesh=mesh, mp_policy=policy.to("fsdp2"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step, batch in enumerate(batches(options.steps, rank=dist.get_rank()), 1):
        loss = loss_of(model(batch["input_ids"].to(device)), batch["labels"].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step in (1, options.steps) or step % 10 == 0):
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
