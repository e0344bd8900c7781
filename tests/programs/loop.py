"""A custom training loop with one Linear layer, in any engine; each rank prints its final state.

The inputs are such that the mean gradient over two ranks, 0.5 + 2**-11, exists in FP32 and is 0.5 in
BF16: the printed gradient shows the dtype in which it was reduced.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("engine", choices=("plain", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"))
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--activate", metavar="RECIPE", help="mpguard.activate after everything has been built")
parser.add_argument("--auto", action="store_true", help="import mpguard.auto")
parser.add_argument("--dtype", default="bfloat16", help="the dtype that the script itself gives its engine")
parser.add_argument("--slow-rank", type=int, default=-1, help="a rank that ends before its first step")
parser.add_argument("--compress", action="store_true", help="a communication hook of DDP that reduces in BF16")
parser.add_argument("--flat", action="store_true", help="FSDP1 without the model's own parameters")
parser.add_argument("--local_rank", help="set by the deepspeed launcher")
options = parser.parse_args()

if options.auto:
    import mpguard.auto

rank = int(os.environ.get("RANK", "0"))
dtype = getattr(torch, options.dtype)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
if options.engine != "plain" and not options.engine.startswith("zero"):
    dist.init_process_group("gloo")
if options.engine == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
    if options.compress:

        def compress(_state, bucket):  # DDP refuses annotations that are text
            half = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
            future = dist.all_reduce(half, async_op=True).get_future()
            return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

        model.register_comm_hook(None, compress)
elif options.engine == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    mixed = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    model = FullyShardedDataParallel(
        model, mixed_precision=mixed, device_id=torch.device("cpu"), use_orig_params=not options.flat
    )
elif options.engine == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if options.engine.startswith("zero"):
    import deepspeed

    name = {"bfloat16": "bf16", "float16": "fp16"}[options.dtype]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(options.engine[-1])},
        "gradient_clipping": 0.0,
        name: {"enabled": True},
    }
    model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
if options.activate:
    import mpguard

    mpguard.activate(options.activate)


def step(stepping: Any) -> None:
    """Step; a rank on which it raises writes the error to a file."""
    try:
        stepping.step()
    except Exception as error:
        Path(f"raised.{rank}").write_text(f"{type(error).__name__}: {error}")
        raise


gradient = None
for _ in range(options.steps):
    inputs = torch.full((1, 16), 1.0 if rank == 0 else 2.0**-10)
    if options.engine.startswith("zero"):
        loss = model(inputs.to(dtype)).float().sum()
        model.backward(loss)
        parameter = next(model.module.parameters())
        gradient = deepspeed.utils.safe_get_full_grad(parameter).flatten()[0].item()
        step(model)
        continue
    with torch.autocast("cpu", dtype, enabled=options.engine in ("plain", "ddp")):
        loss = model(inputs).float().sum()
    loss.backward()
    if rank == options.slow_rank:
        sys.exit(0)
    found = next(model.parameters()).grad
    found = found.to_local() if hasattr(found, "to_local") else found
    gradient = found.flatten()[0].item() if found is not None and found.numel() else None
    step(optimizer)
    optimizer.zero_grad()

world = dist.get_world_size() if dist.is_initialized() else 1
sys.stdout.write(json.dumps({"rank": rank, "world": world, "gradient": gradient}) + "\n")
sys.stdout.flush()
if dist.is_initialized():
    dist.destroy_process_group()
