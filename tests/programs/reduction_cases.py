"""Programs of two processes that reduce by hand, or over a part of the ranks; run as those of step_cases are."""

from __future__ import annotations

from collections.abc import Callable

import step_cases
import torch
import torch.distributed as dist
from step_cases import DDP, adam, batches, case, loss_of, net, rank, train
from torch import nn

step_cases.CASES.clear()
main = step_cases.main

# -- ZeRO-1 by hand ------------------------------------------------------------------------------


def _reduce_scatter(output: torch.Tensor, flat: torch.Tensor) -> None:
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, flat)


def _zero1(scatter: Callable[[nn.Parameter, torch.Tensor], None], recipe_enabled: bool = True) -> None:
    """Step a shard of the flat weights. scatter: sets its gradient from the flat gradient of this rank."""
    model = net()
    own = list(model.parameters())
    flat = torch.cat([each.detach().reshape(-1) for each in own])
    shard = nn.Parameter(flat.chunk(2)[rank].clone())
    optimizer = adam([shard])
    for inputs in batches():
        model.zero_grad()
        loss_of(model, inputs, recipe_enabled).backward()
        scatter(shard, torch.cat([each.grad.reshape(-1) for each in own]))  # type: ignore[union-attr]
        optimizer.step()
        whole = torch.empty_like(flat)
        dist.all_gather_into_tensor(whole, shard.detach())
        for each, part in zip(own, whole.split([each.numel() for each in own]), strict=True):
            each.data.copy_(part.view_as(each))


@case()
def own_zero1() -> None:
    def scatter(shard: nn.Parameter, flat: torch.Tensor) -> None:
        shard.grad = torch.empty_like(shard)
        _reduce_scatter(shard.grad, flat)
        shard.grad /= 2

    _zero1(scatter)


@case()
def own_zero1_with_a_buffer_that_is_gone() -> None:
    def scatter(shard: nn.Parameter, flat: torch.Tensor) -> None:
        output = torch.empty_like(shard)
        _reduce_scatter(output, flat)
        shard.grad = output / 2

    _zero1(scatter)


@case()
def own_zero1_divided_before() -> None:
    output = torch.empty(0)

    def scatter(shard: nn.Parameter, flat: torch.Tensor) -> None:
        nonlocal output
        output = torch.empty_like(shard.detach())
        _reduce_scatter(output, flat / 2)
        shard.grad = output.clone()

    _zero1(scatter)


@case()
def own_zero1_of_lists() -> None:
    def scatter(shard: nn.Parameter, flat: torch.Tensor) -> None:
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter(shard.grad, list((flat / 2).chunk(2)))

    _zero1(scatter)


@case()
def own_zero1_in_bf16() -> None:
    def scatter(shard: nn.Parameter, flat: torch.Tensor) -> None:
        half = torch.empty_like(shard.detach(), dtype=torch.bfloat16)
        _reduce_scatter(half, flat.bfloat16())
        shard.grad = half.float() / 2

    _zero1(scatter)


@case()
def own_zero1_in_fp32() -> None:
    def scatter(shard: nn.Parameter, flat: torch.Tensor) -> None:
        shard.grad = torch.empty_like(shard)
        _reduce_scatter(shard.grad, flat / 2)

    _zero1(scatter, recipe_enabled=False)


@case()
def own_zero1_that_does_not_reduce() -> None:
    def scatter(shard: nn.Parameter, flat: torch.Tensor) -> None:
        shard.grad = flat.chunk(2)[rank].clone()

    _zero1(scatter)


@case()
def own_zero1_that_throws_the_sum_away() -> None:
    kept = torch.empty(0)

    def scatter(shard: nn.Parameter, flat: torch.Tensor) -> None:
        nonlocal kept
        kept = torch.empty_like(shard.detach())
        _reduce_scatter(kept, flat / 2)
        shard.grad = flat.chunk(2)[rank].clone()

    _zero1(scatter)


# -- a group that is not all ranks ---------------------------------------------------------------

_groups: list[dist.ProcessGroup] = []


def _group_of_one() -> dist.ProcessGroup:
    if not _groups:
        _groups.extend(dist.new_group([each]) for each in range(2))
    return _groups[rank]


@case()
def ddp_over_one_rank() -> None:
    model = DDP(net(), process_group=_group_of_one())
    train(model, adam(model))


@case()
def ddp_over_a_group_of_all_ranks() -> None:
    model = DDP(net(), process_group=dist.new_group([0, 1]))
    train(model, adam(model))


@case()
def ddp_over_one_rank_for_an_ensemble() -> None:
    """Each rank has a model of its own from the beginning."""
    model = net()
    with torch.no_grad():
        for own in model.parameters():
            own.add_(0.01 * rank)
    wrapped = DDP(model, process_group=_group_of_one())
    train(wrapped, adam(wrapped))


@case()
def ddp_over_one_rank_reduced_by_the_script() -> None:
    model = DDP(net(), process_group=_group_of_one())
    optimizer = adam(model)
    for inputs in batches():
        loss_of(model, inputs).backward()
        for own in model.parameters():
            dist.all_reduce(own.grad)
            own.grad /= 2
        optimizer.step()
        optimizer.zero_grad()


@case()
def ddp_over_one_rank_in_a_pipeline() -> None:
    """Both stages begin with the same weights, as a seed for all ranks gives them."""
    stage = DDP(net(), process_group=_group_of_one())
    optimizer = adam(stage)
    for inputs in batches():
        if rank == 0:
            sent = stage(inputs).float()
            dist.send(sent.detach(), 1)
            gradient = torch.empty_like(sent)
            dist.recv(gradient, 1)
            with torch.autocast("cpu", torch.bfloat16):
                sent = stage(inputs).float()
            sent.backward(gradient)
        else:
            received = torch.empty(16, 32)
            dist.recv(received, 0)
            received.requires_grad_()
            loss_of(stage, received).backward()
            assert received.grad is not None
            dist.send(received.grad, 0)
        optimizer.step()
        optimizer.zero_grad()


@case("fsdp2")
def fsdp2_over_one_rank() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=DeviceMesh.from_group(_group_of_one(), "cpu"))
    optimizer = adam(model)
    for inputs in batches():
        model(inputs).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@case()
def reduced_in_hooks_of_the_backward_pass() -> None:
    model = net()

    def reduce(parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    optimizer = adam(model)
    for inputs in batches():
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- what one rank trains alone ------------------------------------------------------------------


def _with_a_probe(of: int, enabled: bool = True) -> None:
    model, probe = DDP(net()), nn.Linear(32, 2)
    optimizer, own = adam(model), torch.optim.SGD(probe.parameters(), 0.1)
    for inputs in [*batches(), *batches()]:
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == of:
            loss_of(probe, inputs, enabled).backward()
            own.step()
            own.zero_grad()


@case()
def a_probe_on_rank_0() -> None:
    _with_a_probe(0)


@case()
def a_probe_on_rank_1() -> None:
    _with_a_probe(1)


@case()
def a_probe_on_rank_0_in_fp32() -> None:
    _with_a_probe(0, enabled=False)


@case()
def a_second_model_on_both_ranks_that_is_not_reduced() -> None:
    _with_a_probe(rank)
