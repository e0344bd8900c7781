"""Compile the models of an optimizer when the optimizer is created, if the policy requires it.

This is for custom training loops. With an `Accelerator`, accelerate compiles when it prepares a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpguard.nn import compile as compilation
from mpguard.runtime.guard import Guard
from mpguard.runtime.proof.observe import models_of, updated_by

if TYPE_CHECKING:
    import torch


def compile_models(guard: Guard, optimizer: torch.optim.Optimizer) -> None:
    """Compile in place the models that an optimizer updates, unless the script has compiled them.

    Raises `NotInForce` if a model cannot be compiled and the policy has compile=True.
    """
    from mpguard.nn.fp8.weights import is_kept_in_fp8

    parameters = updated_by(optimizer)
    policy = guard.plan.policy.decided(fp8_param=any(map(is_kept_in_fp8, parameters)))
    chosen = compilation.wants_compile(policy)
    if not chosen.on or not guard.compiles_models or guard.failure is not None:
        return
    for model in models_of(parameters):
        if missing := compilation.missing_requirement(model):
            if policy.compile is True:
                guard.fail(
                    f"compile: {missing}, and the policy has compile=True. To compile where possible: "
                    "mpguard_overrides: {compile: auto}"
                )
            else:
                guard.reporter.print_once(f"mpguard: compile: auto is off here: {missing}, though {chosen.reason}")
        elif compilation.compile_in_place(model):
            blocks = compilation.by_block(model)
            auto = f"compile: auto is on here{blocks}: {chosen.reason}"
            guard.reporter.print_once(
                f"mpguard: {auto if policy.compile == 'auto' else f'the model is compiled in place{blocks}'}"
            )
