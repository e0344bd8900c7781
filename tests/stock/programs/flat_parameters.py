"""Wrap a model in FSDP1 after its optimizer was created, as with accelerate's `prepare`; print if it trains."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def weights() -> torch.Tensor:
    with FullyShardedDataParallel.summon_full_params(wrapped):
        return torch.cat([parameter.detach().flatten() for parameter in wrapped.parameters()])


before = weights()
for _ in range(3):
    wrapped(torch.ones(4, 16)).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
changed = not torch.equal(before, weights())
sys.stdout.write(json.dumps({"rank": int(os.environ["RANK"]), "changed": changed}) + "\n")
sys.stdout.flush()
dist.destroy_process_group()
