"""Trains small models, each with one planted fault, and prints which module the watch names.

python watch_faults.py          all faults of one process
torchrun ... watch_faults.py    those that only one of two ranks has
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpguard

#: The step at which a fault begins.
AT = 4


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * float("nan")


#: Faults: what a module does to its input instead of nothing. Each is right for most inputs, and wrong for these.
FORWARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "divides by zero": lambda x: x / (x - x),
    "exponential overflows": lambda x: (x.float() * 0 + 1000).exp() * x,
    "logarithm of a negative number": lambda x: (-x.abs() - 1).log(),
    "square root of a negative number": lambda x: (-x.abs() - 1).sqrt(),
    "overflows FP16": lambda x: (x + 300).half().square().to(x.dtype) - float("inf"),
    "softmax of a masked row": lambda x: (x * 0 + float("-inf")).softmax(-1),
    "by chance": lambda x: x / (torch.rand_like(x) > 0.01).to(x.dtype),
}
BACKWARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "square root of zero": lambda x: x + (x * 0).sqrt(),
    "masked logarithm": lambda x: x + torch.where(x * 0 > 0, (x * 0).log(), 0.0),
    "own function": Broken.apply,  # type: ignore[no-any-return, no-untyped-call]
    "arc cosine of one": lambda x: x + (x * 0 + 1).acos(),
    "power of zero": lambda x: x + (x * 0).pow(0.3),
    "norm of zero": lambda x: x + (x * 0).square().sum(-1, keepdim=True).sqrt(),
}


class Fault(nn.Module):
    """Does nothing until its fault begins."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.call: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x * self.scale)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.fault, self.down = nn.LayerNorm(16), nn.Linear(16, 16), Fault(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.fault(self.up(self.norm(x)))))
        return y


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 16)
        self.dropout, self.checkpointed = nn.Dropout(0.1), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        y: torch.Tensor = self.head(x)
        return y


def mse(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(y.float(), x)


def train(
    kind: str,
    plant: Callable[[Net], None],
    *,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    loss_of: Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor] = lambda y, x, bad: mse(y, x),
    batch: Callable[[torch.Tensor, bool], torch.Tensor] = lambda x, bad: x,
    micro: int = 1,
    autocast: torch.dtype | None = None,
    clip: bool = True,
    checkpointed: bool = False,
    only: bool = True,
) -> None:
    """Train for a few steps, the last with the fault, and print the events. only: this rank has the fault."""
    torch.manual_seed(3)
    path = Path(f"{kind.replace(' ', '_')}-{os.environ.get('RANK', '0')}.jsonl")
    model = Net(checkpointed)
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mpguard.watch(jsonl=str(path))
    for step in range(1, AT + 1):
        bad = step == AT
        for part in range(micro):
            if bad and only and part == micro // 2:
                plant(model)
            x = batch(torch.randn(8, 16), bad and only)
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                y = wrapped(x)
            (loss_of(y, x, bad and only) / micro).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    mpguard.watch(level="off")
    rank = int(os.environ.get("RANK", "0"))
    own = path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}.jsonl")
    lines = [json.loads(line) for line in own.read_text().splitlines()] if own.exists() else []
    found = [line for line in lines if line["event"] == "nonfinite"]
    print(json.dumps({"rank": rank, "kind": kind, "found": found}), flush=True)
    torch.compiler.reset()


def planted(call: Callable[[torch.Tensor], torch.Tensor], block: int = 2) -> Callable[[Net], None]:
    def plant(model: Net) -> None:
        model.blocks[block].fault.call = call  # type: ignore[union-attr, assignment]

    return plant


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def nothing(_model: Net) -> None:
    """Plant no fault in the model."""


def spoil_weights(model: Net) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = float("nan")  # type: ignore[union-attr, index, operator]


def single() -> None:
    for number, (name, call) in enumerate(FORWARD.items()):
        train(f"forward: {name}", planted(call), clip=bool(number % 2))
    for number, (name, call) in enumerate(BACKWARD.items()):
        train(f"backward: {name}", planted(call), clip=bool(number % 2))
    zero, root = FORWARD["divides by zero"], BACKWARD["square root of zero"]
    train("compiled, forward", planted(zero, 1), wrap=compiled)
    train("compiled, backward", planted(root, 1), wrap=compiled)
    train("compiled in place, forward", planted(zero, 3), wrap=in_place)
    train("checkpointed, forward", planted(zero, 0), checkpointed=True)
    train("checkpointed, backward", planted(root, 0), checkpointed=True)
    train("micro-batches, forward", planted(zero), micro=4)
    train("BF16, backward", planted(root), autocast=torch.bfloat16)
    train("the weights", spoil_weights)
    train("the batch", nothing, batch=lambda x, bad: x / 0 if bad else x)
    train(
        "the loss function, forward",
        nothing,
        loss_of=lambda y, x, bad: mse(y, x) * (0.0 / (y.detach() * 0).sum() if bad else 1),
    )
    train(
        "the loss function, backward",
        nothing,
        loss_of=lambda y, x, bad: mse(y, x) + ((y * 0).sum().sqrt() if bad else 0),
    )


def double() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def ddp(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)

    for own in (0, 1):
        zero, root = FORWARD["divides by zero"], BACKWARD["square root of zero"]
        train(f"rank {own}, forward", planted(zero, 1), wrap=ddp, only=rank == own)
        train(f"rank {own}, backward", planted(root, 1), wrap=ddp, only=rank == own)

    def gather(x: torch.Tensor) -> torch.Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return x / (total - total)

    train("a collective in the model", planted(gather, 1), wrap=ddp)
    dist.destroy_process_group()


def cases() -> Iterator[Callable[[], None]]:
    yield double if int(os.environ.get("WORLD_SIZE", "1")) > 1 else single


for case in cases():
    case()
