"""Compiles the models of an optimizer as it is built, where the policy asks for it.

In loops of one's own. Where there is an `Accelerator`, it does so, when it prepares a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpguard.nn import compile as compilation
from mpguard.runtime.guard import Guard
from mpguard.runtime.proof.observe import models_of, updated_by

if TYPE_CHECKING:
    import torch


def compile_models(guard: Guard, optimizer: torch.optim.Optimizer) -> None:
    """What the script has compiled is its own. Raises `NotInForce` where nothing can be compiled and it must be."""
    policy = guard.plan.policy
    chosen = compilation.wants_compile(policy)
    if not chosen.on or not guard.compiles or guard.failure is not None:
        return
    for model in models_of(updated_by(optimizer)):
        if lacking := compilation.missing_requirement(model):
            if policy.compile is True:
                guard.fail(f"compile: {lacking}, and the policy has compile=True")
            else:
                guard.report(f"mpguard: compile: auto is off here: {lacking}, though {chosen.reason}")
        elif compilation.compile_in_place(model):
            auto = f"compile: auto is on here: {chosen.reason}"
            guard.report(f"mpguard: {auto if policy.compile == 'auto' else 'the model is compiled in place'}")
