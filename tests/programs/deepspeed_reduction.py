"""One of two processes: trains a model under DeepSpeed with what `policy.to("deepspeed")` gives, on CPU.

Prints, for each policy and ZeRO stage, a line of JSON: the dtypes of parameters, master weights and
optimizer states, and those in which gradients went through a collective.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed

collected: set[str] = set()


def record(name: str) -> None:
    original = getattr(torch.distributed, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        for tensor in (*args, *kwargs.values()):
            if torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.numel() > 8:  # no norms, no flags
                collected.add(f"{tensor.dtype}".removeprefix("torch."))
        return original(*args, **kwargs)

    setattr(torch.distributed, name, recorded)


for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "all_to_all"):
    record(name)

import deepspeed  # noqa: E402  (keeps the functions that it finds)

import mpguard  # noqa: E402


def names(tensors: Any) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def train(policy: mpguard.Policy, stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    strategy = f"deepspeed-zero{stage}" if stage else "ddp"
    config = {
        **policy.to("deepspeed", strategy),
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    collected.clear()  # parameters were sent around
    for _ in range(2):
        inputs = torch.randn(2, 16, dtype=next(engine.module.parameters()).dtype)
        engine.backward(engine(inputs).float().pow(2).mean())
        engine.step()
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() > 1
    ]
    masters = optimizer.param_groups[0]["params"] if stage < 3 else engine.optimizer.fp32_partitioned_groups_flat
    return {
        "parameters": names(engine.module.parameters()),
        "masters": names(masters),
        "states": names(states),
        "reduced": sorted(collected),
    }


def main() -> None:
    deepspeed.init_distributed("gloo")
    for line in sys.argv[1:]:
        text, stage = line.rsplit(" ", 1)
        result = train(mpguard.Policy.parse(text), int(stage))
        if os.environ["RANK"] == "0":
            print("RESULT " + json.dumps(result), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # after several engines in one process, gloo's threads abort it at exit now and then


main()
