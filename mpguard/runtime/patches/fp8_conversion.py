"""What becomes of the models of an optimizer as it is built: FP8 layers, where the policy asks for them.

Every loop makes an optimizer, whatever framework it uses; its parameters say which models are trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpguard.core.console import print_line
from mpguard.core.errors import NotInForce
from mpguard.nn.fp8.filters import plain_name
from mpguard.policy.policy import Policy
from mpguard.runtime.guard import Guard
from mpguard.runtime.proof.consensus import rank
from mpguard.runtime.proof.observe import engine_of, models_of, updated_by, world_size
from mpguard.targets.capabilities import FP8_WEIGHTS, fp8_weights

if TYPE_CHECKING:
    import torch
    from torch import nn


def convert(guard: Guard, optimizer: torch.optim.Optimizer) -> None:
    """Makes FP8 layers in the models that an optimizer will update, where the policy asks for them.

    A model that has some already is left to the script that put them there; the proof judges it. Raises
    `NotInForce` where this machine has no FP8, `PolicyError` where no blocks are found for both ends.
    """
    if guard.plan.policy.low_bit_recipe is None or not guard.converts:
        return
    roots = models_of(updated_by(optimizer))
    engine = engine_of(roots, guard.recorder, world_size()[0])
    kept = may_keep(guard, guard.plan.strategy or ("ddp" if engine == "none" else engine), optimizer)
    for root in roots:
        _convert(guard, root, guard.plan.policy if kept else guard.plan.policy.replace(fp8_param=False))


def convert_before_ddp(guard: Guard, model: nn.Module) -> None:
    """DDP holds on to the parameters that it finds; those that are to be kept in FP8 become so before."""
    if guard.plan.policy.fp8_param and guard.converts and fp8_weights(guard.plan.policy, "ddp"):
        _convert(guard, model, guard.plan.policy)


def _convert(guard: Guard, root: nn.Module, policy: Policy) -> None:
    from mpguard.nn.fp8 import convert as conversion
    from mpguard.nn.fp8 import filters

    modules = [(plain_name(name), module) for name, module in root.named_modules()]
    if conversion.has_others(modules, policy) or "" not in filters.reasons(modules, policy).values():
        return
    for field in conversion.not_carried(policy):
        guard.fail(
            f"{field}={policy.format_field(field)}: converted Linear layers have no place for it. "
            f"To go without: mpguard_overrides: {{{field}: {str(not getattr(policy, field)).lower()}}}"
        )
    try:
        done = conversion.convert_named(root, modules, policy)
    except NotInForce as error:
        guard.fail(str(error))
        return
    if done.converted and rank() == 0:
        print_line(f"mpguard: {str(done).splitlines()[0]}")


def may_keep(guard: Guard, strategy: str | None, optimizer: Any = None) -> bool:
    """Whether parameters can be kept in FP8, where they are to be: by the engine, and by the optimizer.

    Raises `NotInForce` where not, and `enforce` says so.
    """
    policy = guard.plan.policy
    if not policy.fp8_param:
        return True
    reason: str | None = None
    library = fp8_weights(policy, strategy)
    if library is None:
        scaled = f"fp8_recipe {policy.fp8_recipe} ({' or '.join(policy.backends)})"
        reason = f"nothing does so under {strategy} with {scaled}. What does: {'; '.join(FP8_WEIGHTS.values())}"
    elif optimizer is not None and library == "torchao":
        reason = (
            "under FSDP2 float8 all-gather is put into a model by accelerate alone, and there was no "
            "Accelerator before this optimizer; make one first"
        )
    elif optimizer is not None:
        from mpguard.nn.fp8 import weights

        reason = weights.without_masters(optimizer)
    if reason is not None:
        guard.fail(f"fp8_param: {reason}. To go without: mpguard_overrides: {{fp8_param: null}}")
    return reason is None
