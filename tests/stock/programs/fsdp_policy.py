"""FSDP2 with the policies that accelerate's plugin makes; each rank prints in what it computed, and a gradient.

As accelerate does it: the plugin is told the run's precision, `bf16`, and its policy wraps the model. (accelerate
itself applies FSDP on a GPU only.) The mean gradient, 0.5 + 2**-11, is 0.5 in BF16.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))


def trained(policy: str | None) -> tuple[str, float]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
    plugin.set_mixed_precision("bf16")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    seen = []
    model[0].register_forward_hook(lambda _module, _inputs, output: seen.append(str(output.dtype)))
    fully_shard(model, mesh=mesh, mp_policy=plugin.mixed_precision_policy)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((1, 16), 1.0 if rank == 0 else 2.0**-10)).float().sum().backward()
    gradient = next(model.parameters()).grad.to_local().flatten()[0].item()
    optimizer.step()
    return seen[-1].removeprefix("torch."), gradient


found = {name: trained(policy) for name, policy in (("fp16", "fp16"), ("default", None))}
sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")
sys.stdout.flush()
dist.barrier()
os._exit(0)  # S26
