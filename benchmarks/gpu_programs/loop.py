"""A loop without a framework under torchrun: plain torch, DDP, FSDP1, FSDP2 or DeepSpeed, in the policy's precision.

torchrun --nproc_per_node 1 -m mpguard.run --config mp.yaml loop.py --strategy fsdp2 --out facts.json
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from common import ROWS, Chain, Probe, adam, model, options, world
from torch import nn

import mpguard
from mpguard.policy.policy import Policy


def wrapped(net: nn.Module, strategy: str, policy: Policy, device: torch.device) -> nn.Module:
    """Return the model as wrapped by an engine of torch."""
    if strategy == "single":
        return net
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    blocks: Any = net.model.layers  # type: ignore[union-attr]
    if strategy == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            net, auto_wrap_policy=ModuleWrapPolicy({type(blocks[0])}), mixed_precision=policy.to("fsdp1"),
            device_id=device, use_orig_params=True,
        )  # fmt: skip
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy.to("fsdp2"))
    return fully_shard(net, mesh=mesh, mp_policy=policy.to("fsdp2"))


def by_deepspeed(net: nn.Module, stage: int, data: Any, probe: Probe, masters: bool) -> None:
    import deepspeed

    deepspeed.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = adam(net.parameters(), masters)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    probe.begin(engine.module, engine)
    for batch in data:
        loss = engine(**{key: value.to(engine.device) for key, value in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        probe.step(loss)
    probe.end()


def by_torch(net: nn.Module, strategy: str, data: Any, probe: Probe, masters: bool) -> None:
    policy = mpguard.activate()  # the policy of mp.yaml
    precision = policy.to("torch", strategy)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    trained = wrapped(net.to(device), strategy, policy, device)
    optimizer = adam(trained.parameters(), masters)
    scaler = precision.scaler(device.type)
    probe.begin(trained)
    for batch in data:
        with torch.autocast(**precision.autocast(device.type)):
            loss = trained(**{key: value.to(device) for key, value in batch.items()}).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        probe.step(loss)
    probe.end()


def main() -> None:
    parsed = options()
    rank, ranks = world()
    chain, probe = Chain(parsed.steps, ranks), Probe(parsed.out)
    mine = chain.tokens.view(parsed.steps, ranks, ROWS, -1)[:, rank]
    data = ({"input_ids": rows, "labels": rows} for rows in mine)
    if parsed.strategy.startswith("deepspeed"):
        by_deepspeed(model(parsed), int(parsed.strategy[-1]), data, probe, parsed.masters)
    else:
        by_torch(model(parsed), parsed.strategy, data, probe, parsed.masters)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
