"""What becomes of the models of an optimizer as it is built: FP8 layers, where the policy asks for them.

Every loop makes an optimizer, whatever framework it uses; its parameters say which models are trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpguard.conversion.choice import plain_name
from mpguard.errors import NotInForce
from mpguard.plugin import gathers
from mpguard.runtime.guard import Guard
from mpguard.runtime.observe import models_of, updated_by
from mpguard.runtime.saying import say
from mpguard.runtime.verdict import rank

if TYPE_CHECKING:
    import torch


def convert(guard: Guard, optimizer: torch.optim.Optimizer) -> None:
    """Makes FP8 layers in the models that an optimizer will update, where the policy asks for them.

    A model that has some already is left to the script that put them there; the proof judges it. Raises
    `NotInForce` where this machine has no FP8, `PolicyError` where no blocks are found for both ends.
    """
    policy = guard.plan.policy
    if policy.low_bit_recipe is None or not guard.converts:
        return
    if policy.fp8_param:
        why = "converted layers keep exact weights, and quantize them at each forward pass"
        if gathers(policy, guard.plan.strategy):
            why = (
                "under FSDP2 float8 all-gather is put into a model by accelerate alone, and there was no "
                "Accelerator before this optimizer; make one first"
            )
        guard.fail(f"fp8_param: {why}. To go without: mpguard_overrides: {{fp8_param: null}}")
    from mpguard.conversion import choice, swap

    for root in models_of(updated_by(optimizer)):
        modules = [(plain_name(name), module) for name, module in root.named_modules()]
        if swap.has_others(modules, policy) or "" not in choice.reasons(modules, policy).values():
            continue
        for field in swap.not_carried(policy):
            guard.fail(
                f"{field}={policy.text_of(field)}: converted Linear layers have no place for it. "
                f"To go without: mpguard_overrides: {{{field}: {str(not getattr(policy, field)).lower()}}}"
            )
        try:
            done = swap.convert_named(root, modules, policy)
        except NotInForce as error:
            guard.fail(str(error))
            return
        if done.converted and rank() == 0:
            say(f"mpguard: {str(done).splitlines()[0]}")
