"""Programs of many kinds, all right in BF16, in one process: each trains, and prints its losses and weights exactly.

Without mpguard and with it the lines must be the same. With two ranks, those that need them. LEVELS: how closely
mpguard watches; each kind is trained once per level.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 4
SINGLE: dict[str, Callable[[], tuple[list[float], nn.Module]]] = {}
DOUBLE: dict[str, Callable[[], tuple[list[float], nn.Module]]] = {}


def single(kind: Any) -> Any:
    SINGLE[kind.__name__] = kind
    return kind


def double(kind: Any) -> Any:
    DOUBLE[kind.__name__] = kind
    return kind


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return y


class Net(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.blocks, self.head, self.call = nn.ModuleList(Block() for _ in range(2)), nn.Linear(16, 16), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x) if self.call else block(x)
        y: torch.Tensor = self.head(x)
        return y


def batch() -> torch.Tensor:
    """Return random inputs; of each rank others, from the same generator as dropout."""
    return torch.randn(8, 16)


def loss_of(model: Callable[..., torch.Tensor]) -> torch.Tensor:
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    return nn.functional.mse_loss(y.float(), x)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, after: Callable[[int], None] = lambda step: None
) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
        losses.append(loss.item())
    return losses


# -- one process ---------------------------------------------------------------------------------


@single
def loop() -> tuple[list[float], nn.Module]:
    model = Net()
    return train(model), model


@single
def accumulation_clipping_schedule() -> tuple[list[float], nn.Module]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    losses = []
    for step in range(2 * STEPS):
        loss = loss_of(model) / 2
        loss.backward()
        losses.append(loss.item())
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, model


@single
def checkpointing() -> tuple[list[float], nn.Module]:
    model = Net(lambda block, x: checkpoint(block, x, use_reentrant=False))
    return train(model), model


@single
def compiled() -> tuple[list[float], nn.Module]:
    model = Net()
    return train(torch.compile(model, backend="aot_eager")), model


@single
def generator_and_discriminator() -> tuple[list[float], nn.Module]:
    model, critic = Net(), Net()
    of_model, of_critic = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, critic))
    losses = []
    for _ in range(STEPS):
        x = batch()
        with torch.autocast("cpu", torch.bfloat16):
            wrong = critic(model(x).detach()).mean() - critic(x).mean()
        wrong.float().backward()
        of_critic.step()
        of_critic.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            right = -critic(model(x)).mean()
        right.float().backward()
        of_model.step()
        of_model.zero_grad()
        of_critic.zero_grad()
        losses += [wrong.item(), right.item()]
    return losses, model


@single
def closures() -> tuple[list[float], nn.Module]:
    model = Net()
    model.eval()  # without dropout, as the closure is called several times
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    losses: list[float] = []
    x = batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), x)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return losses, model


@single
def evaluation_and_average() -> tuple[list[float], nn.Module]:
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    losses: list[float] = []

    def after(_step: int) -> None:
        average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            losses.append(loss_of(average).item())

    return train(model, after=after) + losses, average


@single
def resumed() -> tuple[list[float], nn.Module]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    return losses + train(model, optimizer), model


@single
def states_before_training() -> tuple[list[float], nn.Module]:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, states = get_state_dict(model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return train(model, optimizer), model


@single
def frozen_part() -> tuple[list[float], nn.Module]:
    model = Net()
    model.blocks[0].requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    return train(model, torch.optim.AdamW(trained, lr=1e-2, foreach=False)), model


@single
def own_function() -> tuple[list[float], nn.Module]:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return 2 * ctx.saved_tensors[0] * gradients[0]

    model = Net(lambda block, x: Square.apply(block(x)))  # type: ignore[no-any-return, no-untyped-call]
    return train(model), model


@single
def accelerated() -> tuple[list[float], nn.Module]:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
    model = Net()
    loader = torch.utils.data.DataLoader(torch.randn(48, 16), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    losses = []
    for x in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x).float(), x)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator.unwrap_model(model)


# -- two processes -------------------------------------------------------------------------------


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **options)


@double
def distributed() -> tuple[list[float], nn.Module]:
    model = Net()
    return train(ddp(model)), model


@double
def no_sync() -> tuple[list[float], nn.Module]:
    model = Net()
    wrapped: Any = ddp(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(2 * STEPS):
        with contextlib.nullcontext() if step % 2 else wrapped.no_sync():
            loss = loss_of(wrapped)
            loss.backward()
        losses.append(loss.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


@double
def compiled_ddp() -> tuple[list[float], nn.Module]:
    model = Net()
    return train(torch.compile(ddp(model), backend="aot_eager")), model


@double
def fsdp1() -> tuple[list[float], nn.Module]:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
    )  # fmt: skip
    return train_without_autocast(model), model


@double
def fsdp2() -> tuple[list[float], nn.Module]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, policy = Net(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return train_without_autocast(model), model


def train_without_autocast(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        x = batch()
        loss = nn.functional.mse_loss(model(x).float(), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@double
def tensor_parallel() -> tuple[list[float], nn.Module]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(7)  # the same data on all ranks
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)), model


@double
def resumed_on_one_rank() -> tuple[list[float], nn.Module]:
    """Rank 0 reads the checkpoint that all have, to check it. Each rank then waits for another's report in vain."""
    model = Net()
    wrapped, optimizer = ddp(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(wrapped, optimizer)
    if dist.get_rank() == 0:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with waiting_less() if "mpguard" in sys.modules else contextlib.nullcontext():
        return losses + train(wrapped, optimizer), model


@double
def accelerated_local_sgd() -> tuple[list[float], nn.Module]:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        losses = train(model, optimizer, lambda step: local.step())
    return losses, accelerator.unwrap_model(model)


# -- all -----------------------------------------------------------------------------------------


def weights(model: nn.Module) -> Iterator[bytes]:
    for each in (*model.parameters(), *model.buffers()):
        local = each.to_local() if hasattr(each, "to_local") else each
        yield local.detach().contiguous().float().numpy().tobytes()


@contextlib.contextmanager
def waiting_less() -> Iterator[None]:
    """Let mpguard wait one second for another rank's report of a later check, in place of ten."""
    from mpguard.runtime.proof import consensus

    usual, consensus.CHECK_TIMEOUT = consensus.CHECK_TIMEOUT, 1.0
    try:
        yield
    finally:
        consensus.CHECK_TIMEOUT = usual


def watch(level: str) -> None:
    import mpguard

    mpguard.watch(level=level)


def main() -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    for name, kind in (DOUBLE if world > 1 else SINGLE).items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        for level in os.environ.get("LEVELS", "").split() or [None]:
            if level is not None:
                watch(level)
            torch.manual_seed(0)
            torch.manual_seed(rank) if world > 1 and name != "tensor_parallel" else None
            losses, model = kind()
            digest = hashlib.sha256(b"".join(weights(model))).hexdigest()
            print(json.dumps({"rank": rank, "kind": name, "losses": losses, "weights": digest}), flush=True)
            torch.compiler.reset()
    if world > 1:
        dist.destroy_process_group()


main()
