"""Train a small model in any engine; each rank prints dtypes, losses and sums of the weights."""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("engine", choices=("plain", "ddp", "fsdp1", "fsdp2", "zero2", "accelerate", "trainer"))
parser.add_argument("--last", action="store_true", help="DDP is created after the optimizer")
parser.add_argument("--passes", type=int, default=1, help="backward passes before each step")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--resume", action="store_true", help="go on, from a checkpoint, in a second model and optimizer")
options = parser.parse_args()

rank = int(os.environ.get("RANK", "0"))


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = network(seed)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}


generator = torch.Generator().manual_seed(7 + rank)
batches = [torch.randint(0, 32, (4, 8), generator=generator) for _ in range(2)]
gradients: set[str] = set()
losses: list[float] = []

# Ranks begin with other weights: DDP gives all of them those of the first one.
model: nn.Module = Net(rank if options.engine == "ddp" else 0)
if options.engine in ("ddp", "fsdp1", "fsdp2"):
    dist.init_process_group("gloo")
if options.engine == "trainer":
    import transformers

    class Recorded(transformers.TrainerCallback):
        def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    arguments = transformers.TrainingArguments(
        output_dir="out", max_steps=options.steps, per_device_train_batch_size=4, logging_steps=1, bf16=True,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in torch.cat(batches)]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Recorded()])
    trainer.train()
    optimizer = trainer.optimizer
else:
    if options.engine == "ddp" and not options.last:
        model = nn.parallel.DistributedDataParallel(model)
    elif options.engine == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif options.engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options.engine == "ddp" and options.last:
        model = nn.parallel.DistributedDataParallel(model)
    accelerator = None
    if options.engine == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        model, optimizer = accelerator.prepare(model, optimizer)
    elif options.engine == "zero2":
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
        config["zero_allow_untested_optimizer"] = True
        model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        found = []
        for number in range(steps):
            ids = batches[number % 2]
            for _ in range(options.passes):
                with torch.autocast("cpu", torch.bfloat16, enabled=options.engine in ("plain", "ddp")):
                    loss = model(ids, ids)["loss"] / options.passes
                if options.engine == "zero2":
                    model.backward(loss)
                    model.step()
                elif accelerator is not None:
                    accelerator.backward(loss)
                else:
                    loss.backward()
            if options.engine != "zero2":
                gradients.update(str(own.grad.dtype) for own in model.parameters() if own.grad is not None)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item() * options.passes)
        return found

    losses = train(model, optimizer, options.steps)
    if options.resume:
        saved = f"checkpoint_{rank}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        loaded = torch.load(saved, weights_only=True)
        second = Net(5)
        other = torch.optim.AdamW(second.parameters(), lr=1e-2)
        second.load_state_dict(loaded["model"])
        other.load_state_dict(loaded["optimizer"])
        assert train(model, optimizer, 4) == train(second, other, 4)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), second.parameters(), strict=True))

inner = getattr(optimizer, "optimizer", optimizer)
found = {
    "rank": rank,
    "losses": losses,
    "parameters": sorted({str(own.dtype).removeprefix("torch.") for own in model.parameters()}),
    "gradients": sorted(each.removeprefix("torch.") for each in gradients),
    "sums": [own.detach().double().sum().item() for own in model.parameters()] if options.engine == "ddp" else [],
}
if options.engine == "ddp":
    from mpguard.nn.master_weights import master_of

    found["sums"] += [master_of(own).value.detach().double().sum().item() for own in model.parameters()]
sys.stdout.write(json.dumps(found) + "\n")
sys.stdout.flush()
if dist.is_initialized():
    dist.destroy_process_group()
