"""Engines and optimizers that cannot keep parameters in FP8 are refused before training. Needs a GPU.

Prints for each attempt the refusal, and if the weights are still plain parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformer_engine.pytorch.optimizers import FusedAdam

import mpguard
from mpguard.runtime import activation
from mpguard.runtime import guard as guards
from mpguard.runtime.plan import Plan

policy = mpguard.Policy(bf16=True, fp8="hybrid", backend="te", fp8_param=True)
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
torch.cuda.set_device(0)


def by_deepspeed(net: nn.Module) -> Any:
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)


def accelerated(_net: nn.Module) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


ATTEMPTS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters()),
    "no masters": lambda net: FusedAdam(net.parameters()),
    "fsdp1": lambda net: FullyShardedDataParallel(net, use_orig_params=True),
    "fsdp2": lambda net: fully_shard(net, mesh=dist.init_device_mesh("cuda", (1,))),
    "deepspeed": by_deepspeed,
    "accelerate": accelerated,
}
for name, attempt in ATTEMPTS.items():
    guards._current = None
    activation.start(Plan(policy, announced=True))
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    try:
        outcome = f"made {attempt(net)!r:.60}"
    except mpguard.NotInForce as error:
        outcome = str(error)
    plain = {type(each) for each in net.parameters()} == {nn.Parameter}
    sys.stdout.write(json.dumps({"rank": 0, "attempt": name, "message": outcome, "plain": plain}) + "\n")
sys.stdout.flush()
dist.destroy_process_group()
