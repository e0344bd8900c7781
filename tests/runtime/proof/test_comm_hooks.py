"""What a communication hook of DDP sends is compared with the gradients that it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from mpguard.runtime.patches import torch_fsdp_gradients
from mpguard.runtime.proof.collectives import CollectiveListener
from mpguard.runtime.proof.comm_hooks import CommHooks
from mpguard.runtime.proof.handoffs import Witness

Changes = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank: DDP has buckets, and calls its hooks."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sent_by(hook: Any, state: Any = None, ranks: int = 1) -> tuple[list[Witness], nn.Module]:
    """Return what was witnessed in a backward pass whose buckets a hook reduces. ranks: those that DDP would have."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 3)))
    found: list[Witness] = []
    hooks = CommHooks(found)

    def observed(state: Any, bucket: Any) -> Any:
        with hooks.during(bucket, ranks):
            return hook(state, bucket)

    observed.__annotations__ = {}  # strings are refused
    model.register_comm_hook(state, observed)
    listener = CollectiveListener(lambda call: hooks.sends(call.tensors))
    listener.start()
    try:
        model(torch.randn(16, 24)).pow(2).mean().backward()
        hooks.pass_ended()
    finally:
        listener.stop()
    return found, model


def changing(change: Changes, *, in_place: bool) -> Any:
    """Return a hook that sends what a function makes of the bucket, in FP32."""

    def hook(_state: Any, bucket: Any) -> Any:
        made = change(bucket.buffer())
        sent = bucket.buffer().copy_(made) if in_place else made
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda future: future.value()[0])

    return hook


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("change", "to", "ranks"),
    [
        (lambda each: each.bfloat16().float() / 2, "bf16", 2),
        (lambda each: (each / 3).half().float(), "fp16 in a multiplication", 3),
        (lambda each: (each.view(torch.int32) & -65536).view(torch.float32), "bf16 towards zero", 2),
    ],
)
def test_a_hook_that_rounds_its_bucket_and_sends_fp32(
    group: None, change: Changes, to: str, ranks: int, in_place: bool
) -> None:
    found, model = sent_by(changing(change, in_place=in_place), ranks=ranks)
    assert found and {(each.row, each.match.to) for each in found} == {("gradients", to)}
    assert "in a communication hook of DDP" in found[0].when
    own = {id(each): each for each in model.parameters()}[found[0].parameter]
    assert own.grad is not None and float(own.grad[found[0].place]) == pytest.approx(found[0].match.after)


@pytest.mark.parametrize(
    ("change", "to", "ranks"),
    [
        (lambda each: each.bfloat16().float(), "bf16", 1),
        (lambda each: (each / 3).half().float(), "fp16 in a multiplication", 3),
        (lambda each: each / 3, None, 3),
        (lambda each: each / 3, None, 1),
        (lambda each: each.clamp(-1e-3, 1e-3), None, 1),
        (torch.zeros_like, None, 1),
    ],
)
def test_a_hook_that_rounds_what_it_has_reduced(group: None, change: Changes, to: str | None, ranks: int) -> None:
    def hook(_state: Any, bucket: Any) -> Any:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda each: change(each.value()[0]))

    found, model = sent_by(hook, ranks=ranks)
    assert {(each.row, each.match.to) for each in found} == ({("gradients", to)} if to else set())
    for each in found:
        assert each.when == "in a communication hook of DDP, after the reduction"
        own = {id(own): own for own in model.parameters()}[each.parameter]
        assert own.grad is not None and float(own.grad[each.place]) == pytest.approx(each.match.after)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        torch.clone,
        lambda each: each / 3,
        lambda each: each.clamp(-1e-3, 1e-3),
        lambda each: each + 1e-6 * torch.randn(1),
    ],
)
def test_a_hook_that_divides_or_clamps_rounds_nothing(group: None, change: Changes, in_place: bool) -> None:
    assert sent_by(changing(change, in_place=in_place), ranks=3)[0] == []


def test_hooks_of_torch_round_nothing_in_fp32(group: None) -> None:
    assert sent_by(default_hooks.allreduce_hook, dist.group.WORLD)[0] == []
    assert sent_by(default_hooks.fp16_compress_hook, dist.group.WORLD)[0] == [], "their dtype is read"


@pytest.mark.parametrize(
    ("change", "to"),
    [
        (lambda each: each.copy_(each.bfloat16()), "bf16"),
        (lambda each: each.copy_((each * 0.25).half()), "fp16"),
        (lambda each: each.mul_(0.25), None),
        (lambda each: each.clamp_(-1, 1), None),
        (lambda each: each.add_(torch.ones_like(each)), None),
    ],
    ids=["bf16", "fp16", "a factor", "clamped", "another rank's"],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_what_a_hook_of_fsdp2_makes_of_reduced_gradients_is_compared(
    change: Changes, to: str | None, keyword: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook is an argument of the function that reduces: by its position, in all versions of torch so far."""
    found: list[Witness] = []
    guard = SimpleNamespace(waiting=True, recorder=SimpleNamespace(comm_hooks=CommHooks(found)))
    monkeypatch.setattr(torch_fsdp_gradients.guards, "current", lambda: guard)
    own, reduced = nn.Parameter(torch.zeros(100)), torch.randn(100)

    def reduce(fsdp_params: Any, unsharded_grads: Any, group: Any, all_reduce_hook: Any) -> None:
        all_reduce_hook(reduced)

    patched = torch_fsdp_gradients._reduce(reduce)
    arguments = ([SimpleNamespace(sharded_param=own)], [reduced], None)
    patched(*arguments, all_reduce_hook=change) if keyword else patched(*arguments, change)
    assert [(each.row, each.parameter, each.match.to.partition(" ")[0]) for each in found] == (
        [("gradients", id(own), to)] if to else []
    )
