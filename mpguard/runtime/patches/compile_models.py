"""Compile the models of an optimizer when the optimizer is created, if the policy requires it, in the policy's mode.

This is for custom training loops. With an `Accelerator`, accelerate compiles when it prepares a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.nn import compile as compilation
from mpguard.nn import cuda_graphs
from mpguard.runtime import compile_progress
from mpguard.runtime import guard as guards
from mpguard.runtime.containment import contained
from mpguard.runtime.guard import Guard
from mpguard.runtime.patches import checks, required
from mpguard.runtime.proof.models import models_of
from mpguard.runtime.proof.observe import updated_by
from mpguard.runtime.proof.verdict import Refusal
from mpguard.targets.inject import Change

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
    if not chosen.on or not guard.compiles_models or guard.refusal is not None:
        return
    for model in models_of(parameters):
        if missing := compilation.missing_requirement(model):
            if policy.compile is True:
                without = "To compile where possible: mpguard_overrides: {compile: auto}"
                guard.fail(Refusal.wrong(f"compile: {missing}, and the policy has compile=True", "compile", without))
            else:
                guard.reporter.print_once(f"mpguard: compile: auto is off here: {missing}, though {chosen.reason}")
        elif compilation.compile_in_place(model, reporting_failures(guard)):
            blocks = compilation.by_block(model)
            auto = f"compile: auto is on here{blocks}: {chosen.reason}"
            guard.reporter.print_once(
                f"mpguard: {auto if policy.compile == 'auto' else f'the model is compiled in place{blocks}'}"
            )


def reporting_failures(guard: Guard) -> Callable[[str], None] | None:
    """Return a function that prints what could not be compiled; None if the policy has compile=True: an error then."""

    def report(failure: str) -> None:
        guard.reporter.print_once(f"mpguard: compile: auto is off here: {failure}, and runs as it is")

    return None if guard.plan.policy.compile is True else report


@patch(
    "torch:compile",
    needs=("model", "backend", "mode"),
    reason="models are compiled in the mode of the policy, also those that the script compiles",
    lost="models are compiled in the script's mode, not in compile_mode of the policy",
    check=checks.compiled,
    required=required.with_compile_mode,
)
def in_the_policys_mode(original: AnyFunction) -> AnyFunction:
    """Return `torch.compile` with the policy's `compile_mode` for models; other functions keep their own.

    Options of inductor, and other compilers, exclude a mode: they are left as they are, and the proof shows it.
    """
    import torch

    @functools.wraps(original)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None:
            with contained("the progress of compilation"):
                compile_progress.watch(guard.reporter.print_once)
        # `Module.compile` passes the method behind the module's call. Others are functions of the script.
        module = model.__self__ if getattr(model, "__name__", "") == "_call_impl" else model
        if guard is None or not isinstance(module, torch.nn.Module) or guard.plan.policy.compile_mode == "default":
            return original(model, *args, **kwargs)
        mode, given = guard.plan.policy.compile_mode, kwargs.get("mode")
        if kwargs.get("options") is None and kwargs.get("backend", compilation.BACKEND) == compilation.BACKEND:
            if given not in (None, "default", mode):
                guard.reporter.log_override("torch.compile", Change("mode", given, mode, "compile_mode"))
            kwargs["mode"] = mode
            compilation.remember_mode(module, mode)
            if mode in cuda_graphs.MODES:
                cuda_graphs.add(module)
        else:
            compilation.remember_mode(module, compilation.OTHER_MODE)
        return original(model, *args, **kwargs)

    return compile
