"""Makes gradients overflow at chosen steps under each engine, and prints what the watch reports.

python watch_skips.py                     plain, fused and accelerate, in one process
torchrun ... watch_skips.py fsdp2         FSDP2 with a GradScaler
python watch_skips.py deepspeed           ZeRO-1, 2, 3 in FP16, ZeRO-1, 2 and BF16_Optimizer in BF16, in one process
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mpguard

STEPS, OVERFLOWS = 8, (3, 6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def report(kind: str, path: Path, applied: list[int]) -> None:
    mpguard.watch(level="off")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [line for line in lines if line["event"] == "step"]
    skips = [line for line in lines if line["event"] == "skipped_step"]
    facts = {
        "steps": [line["step"] for line in steps],
        "skipped": [line["step"] for line in skips],
        "marked": [line["step"] for line in steps if line.get("skipped")],
        "scales": [line["loss_scale"] for line in steps],
        "losses": [line["loss"] for line in steps],
        "norms": [line["grad_norm"] for line in steps],
        "events": sorted({line["event"] for line in lines}),
        "applied": applied,
    }
    print(json.dumps({"rank": int(os.environ.get("RANK", "0")), "kind": kind, **facts}), flush=True)


def loss_of(model: Any, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    x = torch.randn(4, 16)
    loss = (model(x).float() - x).square().mean()
    return loss * float("inf") if step in OVERFLOWS else loss


def changed(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def copies(model: nn.Module) -> list[torch.Tensor]:
    return [own.detach().clone() for own in model.parameters()]


def plain(kind: str, **options: Any) -> None:
    path = Path(f"{kind}.jsonl")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    mpguard.watch(jsonl=str(path))
    applied = []
    for step in range(1, STEPS + 1):
        before = copies(model)
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        applied += [step] if changed(model, before) else []
    report(kind, path, applied)


def accelerated() -> None:
    from accelerate import Accelerator

    path = Path("accelerate.jsonl")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer.scaler = accelerator.scaler
    mpguard.watch(jsonl=str(path))
    applied = []
    for step in range(1, STEPS + 1):
        before = copies(model)
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step))
                optimizer.step()
                optimizer.zero_grad()
        applied += [step] if changed(model, before) else []
    report("accelerate", path, applied)


def deepspeed() -> None:
    import deepspeed

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29531")  # by hand
    # Its engine runs FP16 on a CPU, and only refuses to start.
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda _self: True
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}}
    bf16 = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    accumulated = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        **{f"zero{stage} fp16": (stage, fp16) for stage in (1, 2, 3)},
        **{f"zero{stage} bf16": (stage, bf16) for stage in (1, 2)},
        "BF16_Optimizer": (1, accumulated),
    }
    for kind, (stage, precision) in kinds.items():
        path = Path(f"{kind.replace(' ', '_')}.jsonl")
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, **precision,
        }  # fmt: skip
        mpguard.watch(jsonl=str(path))
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        dtype = torch.float16 if precision is fp16 else torch.bfloat16
        applied = []
        for step in range(1, STEPS + 1):
            skipped = engine.skipped_steps
            engine.backward(loss_of(lambda x, engine=engine, dtype=dtype: engine(x.to(dtype)), step))
            engine.step()
            applied += [step] if engine.skipped_steps == skipped else []
        report(f"{kind} {type(engine.optimizer).__name__}", path, applied)


def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    path = Path("fsdp2.jsonl")
    model: Any = net()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    mpguard.watch(jsonl=str(path))
    applied = []
    for step in range(1, STEPS + 1):
        before = [own.detach().to_local().clone() for own in model.parameters()]
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [own.detach().to_local() for own in model.parameters()]
        applied += [step] if any(not torch.equal(*pair) for pair in zip(before, after, strict=True)) else []
    report("fsdp2", path, applied)
    dist.destroy_process_group()


if sys.argv[1:] == ["deepspeed"]:
    deepspeed()
elif sys.argv[1:] == ["fsdp2"]:
    fsdp2()
else:
    plain("plain")
    plain("fused", fused=True)
    accelerated()
