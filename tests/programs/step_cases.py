"""Programs of a few lines, right and wrong in what belongs to a step; many in one process, each with its own proof.

Run as `program=` of `in_fork` or `ranks_in_fork`. Prints one line of JSON: by name the verdict, the failures, and rows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce as imported_before
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import mpguard
from mpguard.policy.allow import allowances
from mpguard.runtime import guard as guards
from mpguard.runtime import plan_exchange, run_end
from mpguard.runtime.patches.table import apply_patches
from mpguard.runtime.plan import Plan

Case = Callable[[], None]
CASES: dict[str, tuple[Case, str | None, str, dict[str, Any]]] = {}
rank = int(os.environ.get("RANK") or 0)

#: `cuda` for two GPUs with NCCL.
DEVICE = os.environ.get("STEP_DEVICE", "cpu")


def case(strategy: str | None = "ddp", recipe: str = "bf16_mixed", **overrides: Any) -> Callable[[Case], Case]:
    """Add a function to the cases of one or of two processes (those with a strategy other than `single`).

    overrides: fields of the policy, and `allow`, what the run allows.
    """

    def add(function: Case) -> Case:
        CASES[function.__name__] = function, strategy, recipe, overrides
        return function

    return add


def net(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(32, 32), nn.ReLU())]).to(DEVICE)


def _device() -> torch.device:
    return torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device(DEVICE)


def adam(model: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters() if isinstance(model, nn.Module) else model, **more)


def batches(count: int = 4) -> list[torch.Tensor]:
    """Return inputs, others on each rank."""
    torch.manual_seed(1 + rank)
    return list(torch.randn(count, 16, 32).to(DEVICE))


def ones() -> torch.Tensor:
    return torch.ones(16, 32, device=DEVICE)


def loss_of(model: Any, inputs: torch.Tensor, enabled: bool = True) -> torch.Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
        return model(inputs).float().pow(2).mean()


def train(model: Any, optimizer: Any, enabled: bool = True, same: bool = False) -> None:
    inputs = ones() if same else batches(1)[0]
    for _ in range(3):
        loss_of(model, inputs, enabled).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_reducing_by_hand(model: nn.Module) -> None:
    optimizer = adam(model)
    for inputs in batches():
        loss_of(model, inputs).backward()
        for own in model.parameters():
            dist.all_reduce(own.grad)
            own.grad /= 2
        optimizer.step()
        optimizer.zero_grad()


# -- reductions ----------------------------------------------------------------------------------


@case()
def ddp() -> None:
    model = DDP(net())
    train(model, adam(model))


@case()
def ddp_on_the_same_data() -> None:
    model = DDP(net())
    train(model, adam(model), same=True)


@case()
def ddp_compresses_in_cpp() -> None:
    model = DDP(net())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(model, adam(model))


def _compress(_state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    half = bucket.buffer().bfloat16().div_(2)
    done = dist.group.WORLD.allreduce([half]).get_future()
    return done.then(lambda future: bucket.buffer().copy_(future.value()[0]))


@case()
def ddp_compresses_in_a_hook() -> None:
    model = DDP(net())
    model.register_comm_hook(None, _compress)
    train(model, adam(model))


@case()
def ddp_rounds_after_the_reduction() -> None:
    def hook(_state, bucket):  # type: ignore[no-untyped-def]
        sent = bucket.buffer().div_(2)
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda each: each.value()[0].bfloat16().float())

    model = DDP(net())
    model.register_comm_hook(None, hook)
    train(model, adam(model))


@case(grad_reduce_in_fp32=False)
def ddp_compresses_as_asked() -> None:
    ddp_compresses_in_a_hook()


def _by_hand(dtype: torch.dtype, model: Any, reduce: Callable[[torch.Tensor], object]) -> None:
    optimizer = adam(model)
    for inputs in batches(2):
        with model.no_sync():
            loss_of(model, inputs).backward()
        for own in model.parameters():
            gradient = own.grad.to(dtype)
            reduce(gradient)
            own.grad.copy_(gradient / 2)
        optimizer.step()
        optimizer.zero_grad()


@case()
def by_hand_in_fp32() -> None:
    _by_hand(torch.float32, DDP(net()), imported_before)


@case()
def by_hand_with_a_bias_of_one_element() -> None:
    """Its gradient is reduced in a collective of its own."""
    model = nn.Sequential(net(), nn.Linear(32, 1).to(DEVICE))
    for each in model.parameters():
        dist.broadcast(each.data, 0)
    train_reducing_by_hand(model)


@case()
def by_hand_in_bf16() -> None:
    _by_hand(torch.bfloat16, DDP(net()), imported_before)


def _flat(dtype: torch.dtype, metric: torch.dtype) -> None:
    model = net()
    optimizer, own = adam(model), list(model.parameters())
    for inputs in batches(2):
        loss_of(model, inputs).backward()
        flat = torch.cat([each.grad.flatten() for each in own]).to(dtype)  # type: ignore[union-attr]
        imported_before(flat)
        for each, part in zip(own, (flat / 2).split([each.numel() for each in own]), strict=True):
            each.grad.copy_(part.view_as(each))  # type: ignore[union-attr]
        dist.all_reduce(torch.randn(100, 100).to(DEVICE, metric))
        optimizer.step()
        optimizer.zero_grad()


@case()
def flat_in_fp32_and_a_metric_in_bf16() -> None:
    _flat(torch.float32, torch.bfloat16)


@case()
def flat_in_bf16_and_a_metric_in_fp32() -> None:
    _flat(torch.bfloat16, torch.float32)


@case()
def gathered_in_bf16() -> None:
    def gather(gradient: torch.Tensor) -> None:
        parts = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(parts, gradient)
        gradient.copy_(parts[0] + parts[1])

    _by_hand(torch.bfloat16, DDP(net()), gather)


@case()
def only_a_metric() -> None:
    """The data is the same on all ranks, so the gradients do not differ."""
    model = net()
    optimizer = adam(model)
    for _ in range(2):
        loss_of(model, ones()).backward()
        dist.all_reduce(torch.randn(100, 100, device=DEVICE))
        optimizer.step()


@case()
def never_synchronized() -> None:
    model = DDP(net())
    optimizer = adam(model)
    for _ in range(2):
        with model.no_sync():
            loss_of(model, ones()).backward()
        optimizer.step()


@case()
def rounded_after_the_reduction() -> None:
    model = DDP(net())
    optimizer = adam(model)
    for inputs in batches(2):
        loss_of(model, inputs).backward()
        for own in model.parameters():
            own.grad = own.grad.bfloat16().float()
        optimizer.step()
        optimizer.zero_grad()


def _tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(DEVICE)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = adam(model, foreach=False)
    inputs = torch.randn(4, 8, 32).tensor_split(2, 1)[rank].to(DEVICE)
    for _ in range(2):
        output = model(inputs)
        (output.to_local() if hasattr(output, "to_local") else output).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@case("fsdp2")
def tensor_parallel() -> None:
    _tensor_parallel()


@case("fsdp2")
def tensor_parallel_without_the_patch() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    patched = FSDPParam._get_grad_inner_tensor
    FSDPParam._get_grad_inner_tensor = patched.__wrapped__  # type: ignore[attr-defined,method-assign]
    try:
        _tensor_parallel()
    finally:
        FSDPParam._get_grad_inner_tensor = patched  # type: ignore[method-assign]


# -- coverage ------------------------------------------------------------------------------------


@case()
def ddp_ignores_a_weight() -> None:
    model = net()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    wrapped = DDP(model)
    train(wrapped, adam(wrapped), same=True)


@case()
def ddp_ignores_a_weight_of_each_rank() -> None:
    """As with experts: each rank begins with values of its own."""
    model = net()
    with torch.no_grad():
        model[2].weight += rank
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    wrapped = DDP(model)
    train(wrapped, adam(wrapped))


@case()
def head_outside() -> None:
    body, head = DDP(net()), nn.Linear(32, 8).to(DEVICE)
    train(lambda inputs: head(body(inputs)), adam([*body.parameters(), *head.parameters()]))


@case()
def head_outside_that_each_rank_initializes() -> None:
    """As where each rank has a seed of its own: DDP makes only the weights equal that it has."""
    torch.manual_seed(rank)
    head_outside()


@case()
def a_part_outside_for_which_ranks_exchange_activations() -> None:
    """As the embeddings of a recommender, or experts, of which each rank has its own."""
    from torch.distributed.nn.functional import all_to_all_single

    body, own = DDP(net()), nn.Linear(32, 32).to(DEVICE)
    with torch.no_grad():
        own.weight += rank

    def model(inputs: torch.Tensor) -> torch.Tensor:
        hidden = own(inputs)
        y: torch.Tensor = body(all_to_all_single(torch.empty_like(hidden), hidden))
        return y

    train(model, adam([*body.parameters(), *own.parameters()]))


@case()
def a_part_outside_of_a_sharded_classifier() -> None:
    """Each rank has some of the classes: they have the features of all, and one loss."""
    from torch.distributed.nn.functional import all_gather, all_reduce

    body, own = DDP(net()), nn.Linear(32, 8).to(DEVICE)
    with torch.no_grad():
        own.weight += rank
    optimizer = adam([*body.parameters(), *own.parameters()])
    for inputs in batches(2):
        with torch.autocast(DEVICE, torch.bfloat16):
            scores = own(torch.cat(all_gather(body(inputs))))
        all_reduce(scores.float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@case()
def head_outside_reduced_by_hand() -> None:
    body, head = DDP(net()), nn.Linear(32, 8).to(DEVICE)
    optimizer = adam([*body.parameters(), *head.parameters()])
    for inputs in batches(2):
        loss_of(lambda x: head(body(x)), inputs).backward()
        for own in head.parameters():
            dist.all_reduce(own.grad)
            own.grad /= 2  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()


@case("fsdp2")
def fsdp2_ignores_a_weight() -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=dist.init_device_mesh(DEVICE, (2,)), ignored_params={model[2].weight})
    train(model, adam(model, foreach=False))


@case("fsdp1")
def fsdp1_ignores_a_weight() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = net()
    own = FSDP(model, device_id=_device(), use_orig_params=True, ignored_states=[model[2].weight])
    train(own, adam(own))


# -- accumulation --------------------------------------------------------------------------------


@case()
def ddp_accumulates() -> None:
    model = DDP(net())
    optimizer = adam(model)
    for _ in range(2):
        *first, last = batches()
        for inputs in first:
            with model.no_sync():
                (loss_of(model, inputs) / 4).backward()
        (loss_of(model, last) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def _fsdp1(synchronize: bool) -> None:
    import contextlib

    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = FSDP(net(), device_id=_device(), use_orig_params=True)
    optimizer = adam(model)
    *first, last = batches()
    for inputs in first:
        with contextlib.nullcontext() if synchronize else model.no_sync():
            loss_of(model, inputs).backward()
    loss_of(model, last).backward()
    optimizer.step()


@case("fsdp1")
def fsdp1() -> None:
    _fsdp1(True)


@case("fsdp1")
def fsdp1_adds_in_bf16() -> None:
    _fsdp1(False)


class InNumpy(torch.autograd.Function):
    """A product that is no operator of torch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.float().numpy() @ weight.detach().float().numpy().T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        to_x = torch.from_numpy(gradient.float().numpy() @ weight.detach().float().numpy()).to(x.dtype)
        to_weight = torch.from_numpy(gradient.float().numpy().T @ x.float().numpy()).to(weight.dtype)
        return to_x, to_weight


class NumpyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return InNumpy.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


@case("fsdp1")
def fsdp1_multiplies_in_numpy() -> None:
    """The optimizer is created after FSDP1 has made flat parts of the weights."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    own = FSDP(nn.Sequential(NumpyLayer(), net()), device_id=_device(), use_orig_params=True)
    train(own, adam(own))


@case("fsdp2")
def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=dist.init_device_mesh(DEVICE, (2,)))
    optimizer = adam(model)
    for number, inputs in enumerate(batches()):
        model.set_requires_gradient_sync(number == 3)  # type: ignore[operator]
        loss_of(model, inputs).backward()
    optimizer.step()


@case("fsdp2", allow=["fp32: 2"])
def fsdp2_with_a_unit_in_fp32_that_is_allowed() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh, found = net(), dist.init_device_mesh(DEVICE, (2,)), set()
    model[2].register_forward_hook(lambda _module, _inputs, output: found.add(output.dtype))
    fully_shard(model[2], mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = adam(model)
    for inputs in batches(3):
        model(inputs).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found == {torch.float32}, found


class Gathered(torch.autograd.Function):
    """A weight of which each rank has a part: gathered in the forward pass, its gradient scattered in the backward."""

    dtype: torch.dtype | None = torch.float32

    @staticmethod
    def forward(_ctx: Any, part: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        whole = part.new_empty(2 * part.numel())
        dist.all_gather_into_tensor(whole, part.detach())
        return whole.view(32, 32)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        sent = gradient.reshape(-1).to(Gathered.dtype or torch.float32)
        if Gathered.dtype is None:
            return sent.chunk(2)[rank]
        part = sent.new_empty(sent.numel() // 2)
        dist.reduce_scatter_tensor(part, sent)
        return part.float() / 2


def _zero3_by_hand(dtype: torch.dtype | None) -> None:
    whole = net()
    parts = nn.ParameterList(whole[number].weight.detach().reshape(-1).chunk(2)[rank].clone() for number in (0, 2))
    biases = nn.ParameterList(whole[number].bias.detach().clone() for number in (0, 2))
    optimizer, Gathered.dtype = adam([*parts, *biases]), dtype

    def model(inputs: torch.Tensor) -> torch.Tensor:
        for part, bias in zip(parts, biases, strict=True):
            inputs = nn.functional.linear(inputs, Gathered.apply(part), bias).relu()
        return inputs

    for _ in range(2):
        for inputs in batches(2):
            loss_of(model, inputs).backward()
        for bias in biases:
            dist.all_reduce(bias.grad)
            bias.grad /= 2  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()


@case()
def zero3_by_hand() -> None:
    _zero3_by_hand(torch.float32)


@case()
def zero3_by_hand_in_bf16() -> None:
    _zero3_by_hand(torch.bfloat16)


@case()
def zero3_by_hand_without_a_reduction() -> None:
    _zero3_by_hand(None)


def _shards_in_hooks(dtype: torch.dtype | None) -> None:
    """Reduce and scatter each gradient in a hook of its tensor; optimizers have this rank's parts of the weights."""
    model = net()
    parts = [own.detach().reshape(-1).chunk(2)[rank].clone().requires_grad_() for own in model.parameters()]
    optimizer = adam(parts)

    def scatter(own: torch.Tensor, part: torch.Tensor) -> None:
        sent = own.grad.reshape(-1).to(dtype or torch.float32)  # type: ignore[union-attr]
        scattered = sent.chunk(2)[rank].clone()
        if dtype is not None:
            dist.reduce_scatter_tensor(scattered, sent)
        own.grad, part.grad = None, scattered.float() / 2

    for own, part in zip(model.parameters(), parts, strict=True):
        own.register_post_accumulate_grad_hook(lambda own, part=part: scatter(own, part))
    for inputs in batches(3):
        loss_of(model, inputs).backward()
        optimizer.step()
        for own, part in zip(model.parameters(), parts, strict=True):
            dist.all_gather_into_tensor(own.data.view(-1), part.detach())


@case()
def shards_in_hooks() -> None:
    _shards_in_hooks(torch.float32)


@case()
def shards_in_hooks_in_bf16() -> None:
    _shards_in_hooks(torch.bfloat16)


@case()
def shards_in_hooks_without_a_reduction() -> None:
    _shards_in_hooks(None)


class Gather(torch.autograd.Function):
    """The rows of all ranks; the sum of their gradients is scattered."""

    @staticmethod
    def forward(_ctx: Any, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        whole = rows.new_empty(2 * rows.shape[0], rows.shape[1])
        dist.all_gather_into_tensor(whole, rows.contiguous())
        return whole

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        rows = gradient.new_empty(gradient.shape[0] // 2, gradient.shape[1])
        dist.reduce_scatter_tensor(rows, gradient.contiguous())
        return rows


class Scatter(torch.autograd.Function):
    """This rank's rows of the sum over all ranks."""

    @staticmethod
    def forward(_ctx: Any, whole: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Gather.backward(None, whole)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Gather.forward(None, gradient)


def _sequence_parallel(*, reduces_norm: bool) -> None:
    first, last, norm = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.LayerNorm(32)
    torch.manual_seed(1 + rank)
    for own in (*first.parameters(), *last.parameters()):
        nn.init.normal_(own, std=0.1)
    optimizer = adam([*first.parameters(), *last.parameters(), *norm.parameters()])

    def model(rows: torch.Tensor) -> torch.Tensor:
        return rows + Scatter.apply(last(first(Gather.apply(norm(rows).float())).relu()).float())

    for inputs in batches(3):
        loss_of(model, inputs).backward()
        for own in norm.parameters() if reduces_norm else ():
            dist.all_reduce(own.grad)
        optimizer.step()
        optimizer.zero_grad()


@case()
def sequence_parallel_by_hand() -> None:
    _sequence_parallel(reduces_norm=True)


@case()
def sequence_parallel_with_a_norm_of_each_rank() -> None:
    _sequence_parallel(reduces_norm=False)


def _zero(stage: int, *, rounds: bool = False) -> None:
    import deepspeed

    model = net()
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    for inputs in batches(16):  # the fourth step is looked at as well
        engine.backward(engine(inputs.bfloat16()).float().pow(2).mean())
        engine.step()
        for state in engine.optimizer.optimizer.state.values() if rounds else ():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())


@case()
def states_rounded_in_a_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for inputs in batches():
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.optim.state.values():  # each rank has those of its part
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())


@case("deepspeed-zero1")
def zero1() -> None:
    _zero(1)


@case("deepspeed-zero2")
def zero2() -> None:
    _zero(2)


@case("deepspeed-zero3")
def zero3() -> None:
    _zero(3)


@case("deepspeed-zero3")
def states_rounded_under_zero3() -> None:
    _zero(3, rounds=True)


def _accumulate(model: Any, clear: bool, same: bool = False) -> None:
    optimizer = adam(model)
    for _ in range(2):
        for inputs in batches(8):
            (loss_of(model, ones() if same else inputs) / 8).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=clear)


@case("single")
def accumulates() -> None:
    _accumulate(net(), clear=False)


@case("single")
def accumulates_the_same_batch() -> None:
    _accumulate(net(), clear=True, same=True)


def _own_buffers(dtype: torch.dtype) -> None:
    model = net()
    optimizer, own = adam(model), list(model.parameters())
    for _ in range(2):
        buffers = [torch.zeros_like(each, dtype=dtype) for each in own]
        for inputs in batches(8):
            loss_of(model, inputs).backward()
            for buffer, each in zip(buffers, own, strict=True):
                buffer.add_(each.grad.to(dtype))  # type: ignore[union-attr]
                each.grad = None
        for buffer, each in zip(buffers, own, strict=True):
            each.grad = buffer.float() / 8
        nn.utils.clip_grad_norm_(own, 0.1)
        optimizer.step()
        optimizer.zero_grad()


@case("single")
def own_buffers_in_fp32() -> None:
    _own_buffers(torch.float32)


@case("single")
def own_buffers_in_bf16() -> None:
    _own_buffers(torch.bfloat16)


@case("single")
def own_buffers_in_fp16() -> None:
    _own_buffers(torch.float16)


def _returned(dtype: torch.dtype) -> None:
    """Gradients that `torch.autograd.grad` returns, added up in buffers."""
    model = net()
    optimizer, own = adam(model), list(model.parameters())
    for _ in range(2):
        buffers = [torch.zeros_like(each, dtype=dtype) for each in own]
        for inputs in batches(8):
            for buffer, made in zip(buffers, torch.autograd.grad(loss_of(model, inputs), own), strict=True):
                buffer.add_(made)
        for buffer, each in zip(buffers, own, strict=True):
            each.grad = buffer.float() / 8
        optimizer.step()


@case("single")
def returned_gradients_in_fp32() -> None:
    _returned(torch.float32)


@case("single")
def returned_gradients_in_bf16() -> None:
    _returned(torch.bfloat16)


@case("single")
def gradients_that_overflowed_are_thrown_away() -> None:
    model = net()
    optimizer = adam(model)
    for step, inputs in enumerate(batches(8)):
        optimizer.zero_grad()
        loss = loss_of(model, inputs * (float("nan") if step % 4 == 2 else 1))
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()


@case("single")
def throws_away_the_gradients_of_a_first_pass() -> None:
    """As sharpness-aware minimization does, in a loop of its own: those of the second pass are similar."""
    model = net()
    optimizer, parameters = adam(model), list(model.parameters())
    for inputs in batches():
        loss_of(model, inputs).backward()
        with torch.no_grad():
            moved = [0.005 * own.grad / own.grad.norm() for own in parameters]  # type: ignore[operator, union-attr]
            torch._foreach_add_(parameters, moved)
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moved)
        optimizer.step()
        optimizer.zero_grad()


def _perturb(enabled: bool) -> None:
    """Estimate gradients from calls of the model at two points, as evolution strategies do: no backward pass."""
    model = net()
    optimizer, parameters = adam(model), list(model.parameters())
    for inputs in batches():
        noise, losses = [torch.randn_like(own) for own in parameters], []
        with torch.no_grad():
            for moved in (0.01, -0.02):
                torch._foreach_add_(parameters, noise, alpha=moved)
                losses.append(loss_of(model, inputs, enabled))
            torch._foreach_add_(parameters, noise, alpha=0.01)
        for own, each in zip(parameters, noise, strict=True):
            own.grad = (losses[0] - losses[1]) / 0.02 * each
        optimizer.step()


@case("single")
def estimates_gradients() -> None:
    _perturb(enabled=True)


@case("single")
def estimates_gradients_in_fp32() -> None:
    _perturb(enabled=False)


@case("single")
def penalizes_gradients_in_fp32() -> None:
    """As WGAN-GP does: the penalty is differentiated twice, without autocast."""
    model = net()
    optimizer = adam(model)
    for inputs in batches():
        loss = loss_of(model, inputs)
        mixed = inputs.clone().requires_grad_()
        with torch.autocast(DEVICE, enabled=False):
            (made,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        (loss + (made.norm(dim=1) - 1).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@case("single")
def projects_the_gradients_of_two_tasks() -> None:
    model = net()
    optimizer, parameters = adam(model), list(model.parameters())
    for inputs in batches():
        first = torch.autograd.grad(loss_of(model, inputs), parameters)
        second = torch.autograd.grad(loss_of(model, inputs + 1), parameters)
        for own, one, other in zip(parameters, first, second, strict=True):
            own.grad = one + (1 - 0.004 * torch.rand(())) * other
        optimizer.step()


@case("single")
def a_backbone_collects_gradients_in_bf16() -> None:
    """Nothing applies them, or clears them."""
    backbone, head = net().bfloat16(), nn.Linear(32, 32)
    train(lambda inputs: head(backbone(inputs)), adam(head))


def _rounded(model: nn.Sequential, *, begin: bool = False, in_step: bool = False, after: bool = False) -> None:
    """Train a model whose weights in FP32 are rounded to BF16 at the beginning, in each step, or after it."""

    class Rounding(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            _round(model)

    if begin:
        _round(model)
    optimizer = (Rounding if in_step else torch.optim.SGD)(model.parameters(), lr=0.125, momentum=0.9)
    for inputs in batches(5):
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after:
            _round(model)


@torch.no_grad()
def _round(model: nn.Module) -> None:
    for own in model.parameters():
        own.copy_(own.bfloat16())


@case("single")
def a_temperature_in_fp64_has_an_optimizer() -> None:
    """As in soft actor-critic: `torch.tensor(numpy.log(0.01))` is FP64, and nothing is multiplied for it."""
    model, temperature = net(), torch.tensor(-4.6, dtype=torch.float64, requires_grad=True)
    optimizer, its_own = adam(model), adam([temperature])
    for inputs in batches():
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (-temperature.exp() * loss.detach()).backward()
        its_own.step()
        its_own.zero_grad()


@case("single")
def a_temperature_is_fitted_by_lbfgs() -> None:
    """More passes than are looked at, without a product: to calibrate a model after its training."""
    model = net()
    train(model, adam(model))
    temperature = nn.Parameter(torch.ones(1, device=DEVICE))
    optimizer = torch.optim.LBFGS([temperature], lr=0.01, max_iter=50)
    logits, labels = model(ones()).detach() + batches(1)[0], torch.arange(16, device=DEVICE)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits / temperature, labels)
        loss.backward()
        return loss

    optimizer.step(closure)


@case("single")
def weights_from_a_checkpoint_in_bf16() -> None:
    _rounded(net(), begin=True)


@case("single")
def weights_from_zeros() -> None:
    model = net()
    nn.init.zeros_(model[2].weight)
    _rounded(model)


@case("single")
def weights_rounded_in_each_step() -> None:
    _rounded(net(), in_step=True)


@case("single")
def weights_rounded_between_steps() -> None:
    _rounded(net(), after=True)


@case("single")
def states_rounded_between_steps() -> None:
    model = net()
    optimizer = adam(model)
    for inputs in batches(4):
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16().float()


@case("single")
def momentum_that_begins_again() -> None:
    """The first momentum is the gradient, whose values are those of BF16."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs in batches(6):
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state.clear()


@case("single")
def rounded_weights_that_are_loaded() -> None:
    model, best = net(), net().bfloat16().state_dict()
    optimizer = adam(model)
    for inputs in batches(4):
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(best)


def _masters(add_in_fp32: bool) -> None:
    model = net().bfloat16()
    masters = [own.detach().float().requires_grad_() for own in model.parameters()]
    optimizer = adam(masters)
    for _ in range(2):
        for inputs in batches(8):
            model(inputs.bfloat16()).float().pow(2).mean().backward()
            if add_in_fp32:
                for own, master in zip(model.parameters(), masters, strict=True):
                    master.grad = own.grad.float() + (0 if master.grad is None else master.grad)
                    own.grad = None
        for own, master in zip(model.parameters(), masters, strict=True):
            master.grad = master.grad if add_in_fp32 else own.grad.float()
            own.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for own, master in zip(model.parameters(), masters, strict=True):
                own.copy_(master)


@case("single")
def masters_add_in_fp32() -> None:
    _masters(True)


@case("single")
def masters_behind_bf16_sums() -> None:
    _masters(False)


@case("single")
def a_hook_rounds() -> None:
    model = net()
    for own in model.parameters():
        own.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", own.grad.bfloat16().float()))
    _accumulate(model, clear=True)


# -- values between hand-offs --------------------------------------------------------------------


def _through(own: nn.Module, dtype: torch.dtype, factor: float = 1.0) -> None:
    for each in own.parameters():
        each.grad = each.grad.to(dtype).float() * factor  # type: ignore[union-attr]


def _changed(
    *, each_pass: Any = None, before_clipping: Any = None, after_clipping: Any = None, after_step: Any = None,
    model: Any = None,
) -> None:  # fmt: skip
    """Accumulate over three passes, and change gradients or weights in between."""
    model = model or net()
    optimizer = adam(model)
    for _ in range(3):
        for inputs in batches(3):
            (loss_of(model, inputs) / 3).backward()
            if each_pass is not None:
                each_pass(model)
        if before_clipping is not None:
            before_clipping(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if after_clipping is not None:
            after_clipping(model)
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            with torch.no_grad():
                after_step(model)


@case("single")
def rounds_each_pass() -> None:
    _changed(each_pass=lambda model: _through(model, torch.bfloat16))


@case("single")
def rounds_each_pass_to_fp16() -> None:
    _changed(each_pass=lambda model: _through(model, torch.float16))


@case("single")
def rounds_before_clipping() -> None:
    _changed(before_clipping=lambda model: _through(model, torch.bfloat16))


@case("single")
def rounds_at_the_step() -> None:
    _changed(after_clipping=lambda model: _through(model, torch.float16))


@case("single")
def rounds_one_matrix_at_the_step() -> None:
    _changed(after_clipping=lambda model: _through(model[2], torch.bfloat16))


@case("single")
def rounds_and_scales_at_the_step() -> None:
    _changed(after_clipping=lambda model: _through(model, torch.bfloat16, 0.29))


def _scales_by_hand(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()  # type: ignore[union-attr]
    _through(model, dtype, 0.05 / float(norm))


@case("single")
def clips_by_hand() -> None:
    _changed(before_clipping=_scales_by_hand, after_clipping=_scales_by_hand)


@case("single")
def rounds_and_clips_by_hand() -> None:
    _changed(after_clipping=lambda model: _scales_by_hand(model, torch.float16))


@case("single")
def clips_in_bf16() -> None:
    def clip(model: nn.Module) -> None:
        norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()  # type: ignore[union-attr]
        for each in model.parameters():
            each.grad.copy_(each.grad.bfloat16() * (0.05 / norm).bfloat16())  # type: ignore[union-attr]

    _changed(after_clipping=clip)


def _to_grid(values: torch.Tensor, levels: int, dim: int | None = None) -> torch.Tensor:
    largest = values.abs().max() if dim is None else values.abs().amax(dim, keepdim=True)
    return (values * levels / largest).round() * (largest / levels)


def _weights_to_grid(levels: int, dim: int | None) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in (model[0], model[2]):
            layer.weight.copy_(_to_grid(layer.weight, levels, dim))

    return change


@case("single")
def weights_on_a_grid_for_each_row() -> None:
    _changed(after_step=_weights_to_grid(127, 1))


@case("single")
def weights_on_a_grid_of_one_scale() -> None:
    _changed(after_step=_weights_to_grid(127, None))


@case("single")
def weights_on_a_coarse_grid() -> None:
    _changed(after_step=_weights_to_grid(7, 1))


@case("single")
def weights_on_a_grid_of_groups() -> None:
    def change(model: Any) -> None:
        for layer in (model[0], model[2]):
            layer.weight.copy_(_to_grid(layer.weight.view(-1, 16), 127, 1).view(32, 32))

    _changed(after_step=change)


@case("single")
def gradients_on_a_grid() -> None:
    def change(model: Any) -> None:
        for layer in (model[0], model[2]):
            layer.weight.grad = _to_grid(layer.weight.grad, 127)

    _changed(after_clipping=change)


@case("single")
def weights_whose_memory_is_replaced() -> None:
    def change(model: Any) -> None:
        for own in model.parameters():
            own.data = own.data.clone()

    _changed(after_step=change)


@case("single")
def weights_that_are_bounded_and_normalized() -> None:
    def change(model: Any) -> None:
        for own in model.parameters():
            own.clamp_(-0.125, 0.125)
            own.div_(own.norm() if own.ndim < 2 else own.norm(dim=1, keepdim=True))

    _changed(after_step=change)


def _scaled(
    divides: Callable[[torch.Tensor, float], object] | None,
    after: bool = False,
    scale: float = 2.0**16,
    hook: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Train in FP16 with a GradScaler, and divide by its scale in a hook, before or after `unscale_`, or not."""
    torch.manual_seed(0)
    model, scaler = net(), torch.amp.GradScaler(DEVICE, init_scale=scale)
    for own in model.parameters() if hook is not None else ():
        own.register_hook(hook)
    optimizer = adam(model)
    for inputs in batches(4):
        with torch.autocast(DEVICE, torch.float16):
            loss = model(inputs).float().pow(2).mean()
        scaler.scale(loss).backward()
        if after:
            scaler.unscale_(optimizer)
        for own in model.parameters():
            if divides is not None:
                divides(own.grad, scaler.get_scale())  # type: ignore[arg-type]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@case("single", "fp16_mixed")
def divides_by_the_scale_too() -> None:
    _scaled(lambda gradient, scale: gradient.div_(scale))


@case("single", "fp16_mixed")
def multiplies_by_one_over_the_scale_too() -> None:
    _scaled(lambda gradient, scale: gradient.mul_(1 / scale))


@case("single", "fp16_mixed")
def a_hook_divides_by_the_scale_too() -> None:
    _scaled(None, hook=lambda gradient: gradient / 2.0**16)


@case("single", "fp16_mixed")
def divides_by_the_scale_after_unscaling() -> None:
    _scaled(lambda gradient, scale: gradient.div_(scale), after=True)


@case("single", "fp16_mixed")
def divides_by_the_ranks_that_it_would_have() -> None:
    _scaled(lambda gradient, _scale: gradient.div_(8), scale=8.0)


@case("single", "fp16_mixed")
def unscales_and_clips() -> None:
    _scaled(None, after=True)


@case("single")
def states_rounded_to_fp16_between_steps() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for inputs in batches(4):
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values():
            state["momentum_buffer"].copy_(state["momentum_buffer"].half())


@case("single")
def a_hook_bounds() -> None:
    def bound(own: torch.Tensor) -> None:
        own.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]

    model = net()
    for own in model.parameters():
        own.register_post_accumulate_grad_hook(bound)
    _accumulate(model, clear=True)


def _sent(flat: bool, dtype: torch.dtype) -> None:
    """Round the sums of three passes before the script reduces them itself: each, or all in one tensor."""
    model = net()
    optimizer, own = adam(model), list(model.parameters())
    for _ in range(2):
        for inputs in batches(3):
            loss_of(model, inputs).backward()
        rounded = [each.grad.to(dtype).float() for each in own]  # type: ignore[union-attr]
        if flat:
            buffer = torch.cat([each.flatten() for each in rounded])
            imported_before(buffer)
            rounded = [
                part.view_as(each) for part, each in zip(buffer.split(list(map(torch.numel, own))), own, strict=True)
            ]
        for each, values in zip(own, rounded, strict=True):
            each.grad.copy_(values)  # type: ignore[union-attr]
            if not flat:
                imported_before(each.grad)
            each.grad /= 2  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()


@case()
def rounds_before_its_own_reduction() -> None:
    _sent(False, torch.bfloat16)


@case()
def rounds_a_flat_copy_before_its_reduction() -> None:
    _sent(True, torch.float16)


@case()
def reduces_sums_of_three_passes_in_one_tensor() -> None:
    _sent(True, torch.float32)


@case("fsdp2")
def fsdp2_rounds_at_the_step() -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=dist.init_device_mesh(DEVICE, (2,)))
    _changed(model=model, after_clipping=lambda model: _through(model, torch.bfloat16))


@case("fsdp2")
def fsdp2_rounds_each_pass() -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=dist.init_device_mesh(DEVICE, (2,)))
    _changed(model=model, each_pass=lambda model: _through(model, torch.bfloat16))


@case("fsdp1")
def fsdp1_rounds_at_the_step() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = FSDP(net(), device_id=_device(), use_orig_params=True)
    optimizer = adam(model)
    for inputs in batches(3):
        loss_of(model, inputs).backward()
        for own in model.parameters():
            if own.grad is not None and own.grad.numel():
                own.grad.copy_(own.grad.bfloat16())
        optimizer.step()
        optimizer.zero_grad()


# -- optimizers ----------------------------------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """SGD whose states are where a subclass keeps them."""

    def __init__(self, params: Any, dtype: torch.dtype) -> None:
        super().__init__(params, {})
        self.keep([torch.zeros_like(own, dtype=dtype) for own in self.own()])

    def own(self) -> list[torch.Tensor]:
        return [own for group in self.param_groups for own in group["params"]]

    def keep(self, states: list[torch.Tensor]) -> None:
        self.velocity = states

    def kept(self) -> list[torch.Tensor]:
        return self.velocity

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for own, state in zip(self.own(), self.kept(), strict=True):
            state.mul_(0.9).add_(own.grad)  # type: ignore[arg-type]
            own.add_(state.to(own.dtype), alpha=-0.01)


@dataclasses.dataclass(eq=False)
class Box:
    value: torch.Tensor


class Slot:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxed(Momentum):
    def keep(self, states: list[torch.Tensor]) -> None:
        for own, state in zip(self.own(), states, strict=True):
            self.state[own] = {"box": Box(state)}

    def kept(self) -> list[torch.Tensor]:
        return [self.state[own]["box"].value for own in self.own()]


class Nested(Momentum):
    def keep(self, states: list[torch.Tensor]) -> None:
        self.store = {"slots": tuple(map(Slot, states))}

    def kept(self) -> list[torch.Tensor]:
        return [slot.value for slot in self.store["slots"]]


def _states(kind: type[Momentum], dtype: torch.dtype) -> None:
    model = net()
    train(model, kind(model.parameters(), dtype))


@case("single")
def states_in_fp32() -> None:
    _states(Nested, torch.float32)


@case("single")
def states_in_an_attribute() -> None:
    _states(Momentum, torch.bfloat16)


@case("single")
def states_in_a_dataclass() -> None:
    _states(Boxed, torch.bfloat16)


@case("single")
def states_in_slots() -> None:
    _states(Nested, torch.bfloat16)


def _late(
    first: int,
    every: int,
    steps: int,
    enabled: bool,
    create_late: bool = False,
    wrap: Callable[[Any], Any] = lambda m: m,
) -> None:
    """Train one model, and another one from a step on, every few steps. wrap: for several processes."""
    often, rarely = wrap(net()), wrap(net())
    optimizer = adam(often)
    late = None if create_late else adam(rarely)
    for step in range(steps):
        loss_of(often, batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= first and (step - first) % every == 0:
            late = late or adam(rarely)
            loss_of(rarely, batches(1)[0], enabled).backward()
            late.step()
            late.zero_grad()


@case("single")
def steps_every_fifth_time() -> None:
    _late(4, 5, 20, True)


@case("single")
def steps_every_fifth_time_in_fp32() -> None:
    _late(4, 5, 20, False)


@case("single")
def steps_once_when_created() -> None:
    _late(8, 100, 12, True, create_late=True)


@case("single")
def steps_once_when_created_in_fp32() -> None:
    _late(8, 100, 12, False, create_late=True)


@case("single")
def steps_once_late() -> None:
    _late(8, 100, 12, True)


@case("single")
def steps_once_late_in_fp32() -> None:
    _late(8, 100, 12, False)


@case()
def steps_once_late_on_two_ranks() -> None:
    _late(8, 100, 12, True, wrap=DDP)


@case()
def steps_once_late_on_two_ranks_in_fp32() -> None:
    _late(8, 100, 12, False, wrap=DDP)


@case()
def steps_once_late_without_a_reduction() -> None:
    wrapped: list[Any] = []

    def wrap(model: Any) -> Any:
        wrapped.append(model if wrapped else DDP(model))
        return wrapped[-1]

    _late(8, 100, 12, True, wrap=wrap)


@case("fsdp2")
def steps_once_late_with_fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _late(8, 100, 12, True, wrap=lambda model: fully_shard(model, mesh=init_device_mesh(DEVICE, (2,))))


# -- optimizers that call others, or clear gradients ---------------------------------------------


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization: the gradients elsewhere are computed in `step`, and another optimizer applies them.

    dtype: of the copies of the weights.
    """

    def __init__(self, params: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups
        self.dtype = dtype

    def own(self) -> list[torch.Tensor]:
        return [own for group in self.param_groups for own in group["params"] if own.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        for own in self.own():
            self.state[own]["before"] = own.to(self.dtype, copy=True)
            own.add_(own.grad, alpha=0.05)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for own in self.own():
            own.copy_(self.state[own]["before"])
        self.base.step()
        self.zero_grad()


class ClearsGradients(torch.optim.AdamW):
    """Calls the step of its base class, which has hooks of its own, and clears gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        self.zero_grad()
        return result


def _sharpness(dtype: torch.dtype, enabled: bool = True) -> None:
    model, inputs = net(), batches(1)[0]
    optimizer = Sharpness(model.parameters(), dtype)
    for _ in range(3):
        loss_of(model, inputs, enabled).backward()
        optimizer.step(lambda: loss_of(model, inputs, enabled).backward())


@case("single")
def another_optimizer_steps() -> None:
    _sharpness(torch.float32)


@case("single")
def another_optimizer_steps_in_fp32() -> None:
    _sharpness(torch.float32, enabled=False)


@case("single")
def states_in_bf16_around_another_optimizer() -> None:
    _sharpness(torch.bfloat16)


@case("single")
def clears_gradients_in_its_step() -> None:
    adam(net())  # so that the class itself has hooks
    model = net()
    train(model, ClearsGradients(model.parameters()))


@case("single")
def clears_gradients_in_its_step_in_fp32() -> None:
    model = net()
    train(model, ClearsGradients(model.parameters()), enabled=False)


@case()
def ddp_with_an_optimizer_of_a_shard_on_each_rank() -> None:
    model = DDP(net())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


@case()
def ddp_clears_gradients_in_its_step() -> None:
    model = DDP(net())
    train(model, ClearsGradients(model.parameters()))


# -- without an optimizer ------------------------------------------------------------------------


def _by_hand_without_optimizer(model: nn.Module, enabled: bool = True, every: int = 1) -> None:
    for step in range(1, 2 * every + 2):
        loss_of(model, batches(1)[0], enabled).backward()
        if step % every == 0:
            with torch.no_grad():
                for own in model.parameters():
                    own.data.add_(own.grad, alpha=-0.1)
                    own.grad.zero_()


@case("single")
def updates_by_hand() -> None:
    _by_hand_without_optimizer(net())


@case("single")
def updates_by_hand_in_fp32() -> None:
    _by_hand_without_optimizer(net(), enabled=False)


@case("single")
def updates_by_hand_every_fourth_time() -> None:
    _by_hand_without_optimizer(net(), every=4)


@case("single")
def updates_by_hand_and_forgets() -> None:
    model = net()
    loss_of(model, batches(1)[0]).backward()


def _by_returned_gradients(model: nn.Module, enabled: bool = True) -> None:
    own = list(model.parameters())
    for inputs in batches():
        gradients = torch.autograd.grad(loss_of(model, inputs.to(own[0].dtype), enabled), own)
        with torch.no_grad():
            for each, gradient in zip(own, gradients, strict=True):
                each.sub_(0.1 * gradient)


@case("single")
def updates_by_returned_gradients() -> None:
    _by_returned_gradients(net())


@case("single")
def updates_by_returned_gradients_in_fp32() -> None:
    _by_returned_gradients(net(), enabled=False)


@case("single")
def updates_weights_in_bf16_by_returned_gradients() -> None:
    _by_returned_gradients(net().bfloat16(), enabled=False)


def _two_models_in_turn(*enabled: bool) -> None:
    models = [net(layers) for layers in (1, 2)]
    for inputs in batches(8):
        for model, on in zip(models, enabled, strict=True):
            own = list(model.parameters())
            gradients = torch.autograd.grad(loss_of(model, inputs, on), own)
            with torch.no_grad():
                for each, gradient in zip(own, gradients, strict=True):
                    each.sub_(0.1 * gradient)


@case("single")
def updates_two_models_in_turn() -> None:
    _two_models_in_turn(True, True)


@case("single")
def updates_two_models_in_turn_one_in_fp32() -> None:
    _two_models_in_turn(False, True)


@case("single")
def replaces_its_weights() -> None:
    weights = [torch.randn(32, 32, device=DEVICE) / 6 for _ in range(2)]
    for inputs in batches():
        leaves = [each.detach().requires_grad_() for each in weights]
        gradients = torch.autograd.grad(loss_of(lambda x, w=leaves: (x @ w[0]).relu() @ w[1], inputs), leaves)
        weights = [each - 0.1 * gradient for each, gradient in zip(leaves, gradients, strict=True)]


def _functional(gradients_of: Callable[..., Any], enabled: bool = True) -> None:
    model = net()
    weights = {name: own.detach().clone() for name, own in model.named_parameters()}

    def loss(given: Any, inputs: torch.Tensor) -> torch.Tensor:
        return loss_of(lambda each: torch.func.functional_call(model, given, (each,)), inputs, enabled)

    for inputs in batches():
        gradients = gradients_of(loss)(weights, inputs)
        weights = {name: own - 0.1 * gradients[name] for name, own in weights.items()}


@case("single")
def functional() -> None:
    _functional(torch.func.grad)


@case("single")
def functional_in_fp32() -> None:
    _functional(torch.func.grad, enabled=False)


@case("single")
def functional_for_each_sample() -> None:
    def mean_of_each(loss: Any) -> Any:
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))
        return lambda weights, inputs: {name: own.mean(0) for name, own in each(weights, inputs).items()}

    _functional(mean_of_each)


@case("single")
def functional_with_second_derivatives() -> None:
    def penalized(loss: Any) -> Any:
        def norm(given: Any, inputs: torch.Tensor) -> Any:
            return sum(each.pow(2).sum() for each in torch.func.grad(loss)(given, inputs).values())

        return torch.func.grad(lambda given, inputs: loss(given, inputs) + 0.01 * norm(given, inputs))

    _functional(penalized)


@case()
def ddp_updates_by_hand() -> None:
    _by_hand_without_optimizer(DDP(net()))


# -- TF32 ----------------------------------------------------------------------------------------


@case("single", recipe="fp32")
def fp32() -> None:
    model = net()
    train(model, adam(model), enabled=False)


@case("single", recipe="fp32")
def tf32_in_cudnn() -> None:
    """Wrong on a GPU only."""
    torch.backends.cudnn.allow_tf32 = True
    fp32()


@case("single", recipe="fp32")
def tf32_in_cublas() -> None:
    """Wrong on a GPU only; many scripts set it on every machine."""
    torch.backends.cuda.matmul.allow_tf32 = True
    fp32()


@case("single", recipe="fp32")
def bf16_in_onednn() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    fp32()


@case("single", recipe="tf32")
def tf32_by_the_new_names() -> None:
    """Right on a GPU only."""
    torch.backends.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "tf32"
    fp32()


@case("single")
def switches_of_both_kinds() -> None:
    """torch refuses to read `allow_tf32` then."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    model = net()
    train(model, adam(model))


# -- pipelines -----------------------------------------------------------------------------------


def _pipeline(enabled: bool = True, seed: int = rank) -> None:
    """Train a stage on each rank: the first one gets the gradients of its outputs from the second one."""
    stage = net()
    torch.manual_seed(seed)
    for own in stage.parameters():
        nn.init.normal_(own, std=0.1)
    optimizer = adam(stage)
    for inputs in batches(3):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            if rank == 0:
                outputs = stage(inputs).float()
                dist.send(outputs.detach(), 1)
                gradient = torch.empty_like(outputs)
                dist.recv(gradient, 1)
                outputs.backward(gradient)
            else:
                received = torch.empty_like(inputs)
                dist.recv(received, 0)
                received.requires_grad_()
                stage(received).float().pow(2).mean().backward()
                dist.send(received.grad, 0)
        optimizer.step()
        optimizer.zero_grad()


@case(strategy=None)
def pipeline_by_hand() -> None:
    _pipeline()


@case(strategy=None)
def pipeline_in_fp32() -> None:
    _pipeline(enabled=False)


@case(strategy=None)
def copies_that_send_activations() -> None:
    """Both ranks have the same weights, so that their gradients belong together."""
    _pipeline(seed=0)


def _gossip(flat: bool) -> None:
    """Each rank trains a model of its own, and averages the weights with those of its neighbour."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).to(DEVICE)
    optimizer = adam(model)
    for inputs in batches():
        loss_of(model, inputs).backward()
        own = list(model.parameters())
        sent = [torch.cat([each.detach().flatten() for each in own])] if flat else [each.data for each in own]
        got = [torch.empty_like(each) for each in sent]
        for mine, theirs in zip(sent, got, strict=True):
            for turn in (0, 1):
                dist.send(mine, 1 - rank) if turn == rank else dist.recv(theirs, 1 - rank)
        weights = got[0].split([each.numel() for each in own]) if flat else got
        for each, other in zip(own, weights, strict=True):
            each.data.lerp_(other.view_as(each), 0.5)
        optimizer.step()
        optimizer.zero_grad()


@case()
def gossip_of_weights() -> None:
    _gossip(flat=False)


@case()
def gossip_of_weights_in_one_tensor() -> None:
    _gossip(flat=True)


@case(strategy=None)
def pipeline_of_torch() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = net()
            torch.manual_seed(rank)
            nn.init.normal_(self.own[0].weight, std=0.1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                return self.own(inputs).float()  # type: ignore[no-any-return]

    model = Stage()
    stage = PipelineStage(model, rank, 2, _device())
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = adam(model)
    for inputs in batches(3):
        schedule.step(inputs) if rank == 0 else schedule.step(target=inputs)
        optimizer.step()
        optimizer.zero_grad()


# -- all of them ---------------------------------------------------------------------------------


# Each case has a plan of its own, and a rank may begin the next one before the other has read the last one's.
plan_exchange.check = plan_exchange.check_settled = lambda *_given: None  # type: ignore[assignment]


def prove(function: Case, strategy: str | None, recipe: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Run a program with a guard of its own, and return what was proven."""
    allow = allowances(overrides.pop("allow", []))
    policy = mpguard.recipe(recipe).replace(**overrides)
    processes = 1 if strategy == "single" else 2
    plan = Plan(policy, strategy=strategy, processes=processes, enforce="warn", announced=True, allow=allow)
    guard = guards.Guard(plan)
    guards.set_current(guard)
    if policy.tf32 is not None:
        policy.to("torch").set_tf32()
    guard.listen()
    try:
        function()
        run_end.finalize(guard, 0)
    finally:
        guard.recorder.stop()
        guard.plan = dataclasses.replace(guard.plan, enforce="off")  # its hook on optimizers remains
        for backend in (torch.backends, torch.backends.mkldnn.matmul):
            backend.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "none"
    proof = guard.proof
    assert proof is not None
    rows = {row.name: f"{row.found} | {row.verdict}" for row in proof.rows}
    return {"verdict": proof.verdict, "failures": list(map(str, proof.failures)), "rows": rows}


def main(words: list[str]) -> int:
    """Prove the cases of one process, or of two; of those named, if some are."""
    distributed = int(os.environ.get("WORLD_SIZE") or 1) > 1
    if distributed:
        if DEVICE == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    apply_patches()
    results = {}
    for name, (function, strategy, recipe, overrides) in CASES.items():
        if (strategy != "single") == distributed and (not words or name in words):
            try:
                results[name] = prove(function, strategy, recipe, overrides)
            except Exception as error:
                results[name] = {"verdict": "failed", "failures": [f"{type(error).__name__}: {error}"], "rows": {}}
    sys.stdout.write(json.dumps({"rank": rank, "cases": results}) + "\n")
    if distributed:
        dist.destroy_process_group()
    return 0
