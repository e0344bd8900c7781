"""Rank 0 of many on a fake process group, which moves no data: FSDP2, HSDP, or TP with FSDP2, proven for this rank."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

import mpguard
from mpguard.runtime import plan_exchange
from mpguard.runtime.proof import consensus

kind, ranks, wrong = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["wrong"]
# No other rank exists: nothing can be agreed on.
consensus.Round.result = lambda self, wait: list(self.failures)
plan_exchange.Exchange.wait = lambda self: None
plan_exchange.Exchange.found = lambda self, *args, **more: None
mpguard.activate("bf16_mixed", proof_json="proof.json")
dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.a, self.b = nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.a(self.n(x))))


m = nn.Sequential(*(Block() for _ in range(2)))
if kind == "hsdp":
    mesh = init_device_mesh("cpu", (8, ranks // 8), mesh_dim_names=("replicate", "shard"))
elif kind == "tp":
    grid = init_device_mesh("cpu", (ranks // 8, 8), mesh_dim_names=("dp", "tp"))
    for block in m:
        parallelize_module(block, grid["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    mesh = grid["dp"]
else:
    mesh = init_device_mesh("cpu", (ranks,))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
if wrong:
    m.to(torch.bfloat16)  # no master weights
for part in (*m, m):
    fully_shard(part, mesh=mesh, mp_policy=policy)
o = torch.optim.AdamW(m.parameters())
m(torch.randn(2, 512)).float().square().mean().backward()
o.step()
