"""Keep FP32 master weights in each optimizer, if the policy has `master_weights: optimizer`.

In one process and under DDP. FSDP and ZeRO update FP32 shards, and compute with copies of them in the compute dtype:
they keep master weights themselves, and nothing is changed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mpguard.nn.fp8.filters import plain_name
from mpguard.runtime.guard import Guard
from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.observe import engine_of, shards_of, updated_by
from mpguard.runtime.proof.verdict import Refusal
from mpguard.runtime.ranks import world_size

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Engines that keep master weights themselves: the beginning of their names.
SHARDED = ("fsdp", "deepspeed")


def _wanted(guard: Guard) -> bool:
    policy, strategy = guard.plan.policy, guard.plan.strategy or ""
    return policy.master_weights == "optimizer" and not strategy.startswith(SHARDED) and not guard.engine_depth


def keep_in_optimizer(guard: Guard, optimizer: torch.optim.Optimizer) -> None:
    """Keep the master weights of an optimizer in it, and round the parameters. Raises `NotInForce`."""
    if not _wanted(guard) or guard.refusal is not None:
        return
    from mpguard.nn import master_weights

    parameters = updated_by(optimizer)
    roots = models_of(parameters)
    if engine_of(roots, guard.recorder, world_size()[0]).startswith(SHARDED):
        return
    if reason := _unfit(optimizer, parameters):
        without = "To go without: mpguard_overrides: {master_weights: model}"
        guard.fail(Refusal.wrong(f"master_weights: {reason}", "optimizer", without))
        return
    master_weights.keep(optimizer, _dtype(guard), _exact(roots))


def keep_in_model(guard: Guard, model: nn.Module) -> None:
    """The same before DDP wraps a model: its buckets have the dtype that the parameters have then."""
    if not _wanted(guard):
        return
    from mpguard.nn import master_weights

    exact = _exact([model])
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in exact and shards_of(parameter) == 1:
            master_weights.split(parameter, _dtype(guard))


def share(guard: Guard, ddp: nn.Module) -> None:
    """Give all ranks of DDP the masters of the first one, as it gives them its parameters, and reduce as the policy."""
    if not _wanted(guard):
        return
    from mpguard.nn import master_weights

    master_weights.share(ddp, reduce_in_fp32=guard.plan.policy.grad_reduce_in_fp32)


def leave_to_engine(guard: Guard, models: Iterable[nn.Module]) -> None:
    """Give models their FP32 parameters back, before an engine takes them that keeps master weights itself."""
    if guard.plan.policy.master_weights == "optimizer":
        from mpguard.nn import master_weights

        master_weights.join(parameter for model in models for parameter in model.parameters())


def load(guard: Guard, module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give masters the values that a module has loaded, with all digits."""
    if guard.plan.policy.master_weights != "optimizer":
        return
    from mpguard.nn import master_weights

    own = [(plain_name(name), parameter) for name, parameter in module.named_parameters()]
    master_weights.loaded(own, {plain_name(name): value for name, value in saved.items()})


def _dtype(guard: Guard) -> torch.dtype:
    return guard.plan.policy.compute_dtype.torch


def _exact(roots: Iterable[nn.Module]) -> frozenset[int]:
    """Return the ids of the parameters that stay in FP32: see `sensitive`, and those in `fp32_modules`."""
    from mpguard.nn import fp32, master_weights

    modules = [module for root in roots for module in root.modules()]
    kept = (own for module in modules if fp32.is_kept(module) for own in module.parameters())
    return frozenset(master_weights.sensitive(modules) | set(map(id, kept)))


def _unfit(optimizer: Any, parameters: list[torch.Tensor]) -> str:
    """Return why an optimizer, or its parameters, cannot have masters; empty if they can."""
    if getattr(optimizer, "master_weights", False):
        return f"{type(optimizer).__name__} was created with master weights of its own. Set its master_weights to False"
    if any(type(parameter).__name__ == "DTensor" for parameter in parameters):
        return "the parameters are DTensors (tensor parallelism)"
    return ""
