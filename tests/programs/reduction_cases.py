"""Programs of two processes that reduce by hand, or over a part of the ranks; run as those of step_cases are."""

from __future__ import annotations

from collections.abc import Callable

import step_cases
import torch
import torch.distributed as dist
from step_cases import DDP, adam, batches, case, loss_of, net, rank, train, train_reducing_by_hand
from torch import nn

from mpguard.runtime.inspection import Inspection

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
    train_reducing_by_hand(DDP(net(), process_group=_group_of_one()))


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
def a_probe_for_which_no_rank_waits() -> None:
    waits, agree = [], Inspection.agree

    def waiting(inspection: Inspection, wait: float) -> object:
        waits.append(wait if inspection.seen is not None and inspection.seen.engine == "none" else 0)
        return agree(inspection, wait)

    Inspection.agree = waiting  # type: ignore[assignment,method-assign]
    try:
        _with_a_probe(0)
    finally:
        Inspection.agree = agree  # type: ignore[method-assign]
    assert waits and not any(waits), waits


@case()
def a_probe_on_rank_1() -> None:
    _with_a_probe(1)


@case()
def a_probe_on_rank_0_in_fp32() -> None:
    _with_a_probe(0, enabled=False)


@case()
def a_second_model_on_both_ranks_that_is_not_reduced() -> None:
    _with_a_probe(rank)


# -- sums in buffers of the script ---------------------------------------------------------------


def _adds_up(
    reduce: Callable[[list[nn.Parameter], list[torch.Tensor]], None],
    in_hooks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add up the gradients of two passes in buffers, and remove them. reduce: reduces, and sets gradients."""
    model = net()
    own = list(model.parameters())
    buffers = [torch.zeros_like(each, dtype=dtype) for each in own]
    places = {id(each): buffer for each, buffer in zip(own, buffers, strict=True)}

    def add(parameter: torch.Tensor) -> None:
        places[id(parameter)] += parameter.grad  # type: ignore[arg-type]
        parameter.grad = None

    for each in own if in_hooks else ():
        each.register_post_accumulate_grad_hook(add)
    optimizer = adam(model)
    inputs = batches()
    for first, second in zip(inputs, reversed(inputs), strict=True):
        for buffer in buffers:
            buffer.zero_()
        for part in (first, second):
            loss_of(model, part).backward()
            for each in own if not in_hooks else ():
                add(each)
        reduce(own, buffers)
        optimizer.step()
        optimizer.zero_grad()


def _reduce_each(own: list[nn.Parameter], buffers: list[torch.Tensor]) -> None:
    for each, buffer in zip(own, buffers, strict=True):
        dist.all_reduce(buffer)
        each.grad = buffer.float() / 2


def _reduce_flat(own: list[nn.Parameter], buffers: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers]).to(dtype)
    dist.all_reduce(flat)
    for each, part in zip(own, (flat.float() / 2).split([each.numel() for each in own]), strict=True):
        each.grad = part.view_as(each)


@case()
def main_gradients_reduced_each() -> None:
    _adds_up(_reduce_each)


@case()
def main_gradients_added_up_in_hooks() -> None:
    _adds_up(_reduce_flat, in_hooks=True)


@case()
def main_gradients_reduced_in_bf16() -> None:
    _adds_up(lambda own, buffers: _reduce_flat(own, buffers, torch.bfloat16))


@case()
def main_gradients_added_up_in_bf16() -> None:
    def reduce(own: list[nn.Parameter], buffers: list[torch.Tensor]) -> None:
        _reduce_flat(own, [buffer.float() for buffer in buffers])

    _adds_up(reduce, dtype=torch.bfloat16)


@case()
def main_gradients_reduced_and_thrown_away() -> None:
    def reduce(own: list[nn.Parameter], buffers: list[torch.Tensor]) -> None:
        local = [buffer.clone() for buffer in buffers]
        _reduce_each(own, buffers)
        for each, buffer in zip(own, local, strict=True):
            each.grad = buffer

    _adds_up(reduce)


@case()
def own_zero1_of_a_flat_sum() -> None:
    def scatter(shard: nn.Parameter, flat: torch.Tensor) -> None:
        dist.all_reduce(flat)
        shard.grad = (flat / 2).chunk(2)[rank].clone()

    _zero1(scatter)


@case()
def own_zero1_of_whole_parameters() -> None:
    """Each rank steps its own ones, and sends them to the other."""
    model = net()
    own = list(model.parameters())
    optimizer = adam(own[rank::2])
    for inputs in batches():
        loss_of(model, inputs).backward()
        for each in own:
            dist.all_reduce(each.grad)
            each.grad /= 2  # type: ignore[operator]
        optimizer.step()
        model.zero_grad()
        for number, each in enumerate(own):
            dist.broadcast(each.data, number % 2)


# -- parts of one model --------------------------------------------------------------------------


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(_context: object, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        gradient = gradient.float().contiguous()
        dist.all_reduce(gradient)
        return gradient


class _SumActivations(torch.autograd.Function):
    @staticmethod
    def forward(_context: object, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.float().contiguous()
        dist.all_reduce(inputs)
        return inputs

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def _tensor_parallel(same_data: bool) -> None:
    torch.manual_seed(rank)
    columns, rows = nn.Linear(32, 16), nn.Linear(16, 32, bias=False)
    optimizer = adam([*columns.parameters(), *rows.parameters()])
    torch.manual_seed(7 if same_data else 7 + rank)
    for inputs in torch.randn(4, 16, 32):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = rows(columns(_SumGradients.apply(inputs)).relu())
            outputs = _SumActivations.apply(outputs) if same_data else outputs
        outputs.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@case()
def tensor_parallel_by_hand() -> None:
    _tensor_parallel(same_data=True)


@case()
def models_of_their_own_that_exchange_gradients_of_activations() -> None:
    _tensor_parallel(same_data=False)


def _parallel_layers_between_whole_ones(same_data: bool, one_optimizer: bool = True) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 8))
    parallelize_module(model, dist.init_device_mesh("cpu", (2,)), {"1": ColwiseParallel(), "3": RowwiseParallel()})
    divided = [own for own in model.parameters() if isinstance(own, DTensor)]
    whole = [own for own in model.parameters() if not isinstance(own, DTensor)]
    groups = [[{"params": divided}, {"params": whole}]] if one_optimizer else [divided, whole]
    optimizers = [adam(each, foreach=False) for each in groups]
    torch.manual_seed(7 if same_data else 7 + rank)
    for inputs in torch.randn(4, 16, 32):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
        outputs.float().pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@case()
def parallel_layers_between_whole_ones() -> None:
    _parallel_layers_between_whole_ones(same_data=True)


@case()
def parallel_layers_and_whole_ones_with_an_optimizer_each() -> None:
    _parallel_layers_between_whole_ones(same_data=True, one_optimizer=False)


@case()
def parallel_layers_between_whole_ones_that_are_not_reduced() -> None:
    _parallel_layers_between_whole_ones(same_data=False)


# -- what is not seen ----------------------------------------------------------------------------


@case()
def gradients_sent_as_bytes() -> None:
    model = net()
    optimizer, own = adam(model), list(model.parameters())
    for inputs in batches():
        loss_of(model, inputs).backward()
        flat = torch.cat([each.grad.reshape(-1) for each in own]).view(torch.uint8)  # type: ignore[union-attr]
        parts = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(parts, flat)
        mean = sum(part.view(torch.float32) for part in parts) / 2
        for each, part in zip(own, mean.split([each.numel() for each in own]), strict=True):  # type: ignore[union-attr]
            each.grad.copy_(part.view_as(each))  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


@case()
def a_bias_of_one_element_is_reduced() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = adam(model)
    for inputs in batches():
        loss_of(model, inputs).backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
            each.grad /= 2  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()


@case()
def models_of_their_own() -> None:
    model = net()
    train(model, adam(model))
