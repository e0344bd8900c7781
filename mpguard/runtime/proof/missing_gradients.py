"""Why no parameter of an optimizer has a gradient at its step, as far as it can be read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.observe import updated_by

#: What is known of each cause, and what to do.
UNREDUCED = (
    "FSDP2 holds gradients of them that were not reduced: call `set_requires_gradient_sync(True)` before the last "
    "backward pass of each step"
)
CLEARED = "backward passes have computed them, and they were None when the step began: call `zero_grad` after the step"
UNREACHED = (
    "no backward pass of that step has reached them. If code has replaced parameters (fully_shard, FSDP, a copy, a new "
    "layer), create the optimizer after it"
)


def why(optimizer: Any, reached: Collection[int]) -> str:
    """Return why the parameters of an optimizer have no gradients. reached: ids of the leaves of backward passes."""
    parameters = updated_by(optimizer)
    if any(id(own) in reached for own in parameters):
        return CLEARED
    return UNREDUCED if any(_held_by_fsdp2(parameters)) else UNREACHED


def _held_by_fsdp2(parameters: list[Any]) -> Iterator[bool]:
    """Yield True for each parameter of which FSDP2 holds a gradient of this rank, unsharded."""
    own = {id(each) for each in parameters}
    for root in models_of(parameters):
        for module in root.modules():
            engine: Any = module
            state = engine._get_fsdp_state() if hasattr(engine, "_get_fsdp_state") else None
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for each in (each for group in groups if group is not None for each in group.fsdp_params):
                unsharded = getattr(each, "_unsharded_param", None)
                gradient = getattr(each, "unsharded_accumulated_grad", None)
                yield id(each.sharded_param) in own and (
                    gradient is not None or getattr(unsharded, "grad", None) is not None
                )
