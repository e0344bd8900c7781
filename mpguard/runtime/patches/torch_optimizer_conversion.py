"""Convert, compile and prove the models of an optimizer: when it is created, steps, is loaded or gets parameters."""

from __future__ import annotations

import functools
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks, compile_models, fp8_conversion, fp32_modules, master_weights, required
from mpguard.runtime.proof import account
from mpguard.runtime.proof.observe import updated_by


@patch(
    "torch.optim.optimizer:Optimizer.__init__",
    needs=("params",),
    reason="every loop creates an optimizer: its models are converted to FP8, in each engine (S1, S2, S3, S14, S15)",
    lost="models are not converted, compiled or proven when their optimizer is created",
    check=checks.step,
    required=required.any_policy,
)
def _optimizer_init(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.optimizer_created(self)
            fp32_modules.keep_in_optimizer(guard, self)
            fp8_conversion.convert(guard, self)
            master_weights.keep_in_optimizer(guard, self)
            compile_models.compile_models(guard, self)
            guard.recorder.record_optimizer(updated_by(self))

    return __init__


@patch(
    "torch.optim.optimizer:Optimizer._patch_step_function",
    needs=("self",),
    reason="the account of matmuls goes on after a step, whose range in the profiler must be closed",
    lost="what is computed after the first step of an optimizer is not recorded",
    check=checks.step,
)
def _patch_step(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def _patch_step_function(self: Any) -> None:
        if not getattr(type(self).step, "hooked", False):  # torch is going to call hooks around it
            type(self).step = _between_hooks(type(self).step)
        original(self)
        step: Any = type(self).step
        if not getattr(step, "counted_by_mpguard", False):
            type(self).step = _counted_step(step)

    return _patch_step_function


def _between_hooks(own: AnyFunction) -> AnyFunction:
    """Return the step that a class of optimizers defines, which runs between the hooks before and after a step."""

    @functools.wraps(own)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.waiting:
            return own(self, *args, **kwargs)
        guard.recorder.pre_hooks_ended(self)
        result = own(self, *args, **kwargs)
        guard.recorder.post_hooks_begin(self)
        return result

    return step


def _counted_step(hooked: AnyFunction) -> AnyFunction:
    """Return the step of a class of optimizers, around the range that torch opens in the profiler."""

    @functools.wraps(hooked)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None:
            guard.step_begins(self)
        closure = any(map(callable, (*args, *kwargs.values())))
        with account.step_of(self, trains=closure):
            result = hooked(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.recorder.account.resume()
            _drop_stale_copies(guard)
        return result

    step.counted_by_mpguard = True  # type: ignore[attr-defined]
    return step


def _drop_stale_copies(guard: guards.Guard) -> None:
    """Drop the copies of weights that autocast keeps until its outermost region ends, if a step ran inside of one."""
    import torch

    if torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()
        guard.reporter.print_once(
            "optimizer.step() runs inside of autocast, which would keep multiplying by its copies of the weights from "
            "before the step (S39): mpguard drops them after each step. Enter autocast in each step, around the "
            "forward pass and the loss only"
        )


@patch(
    "torch.optim.optimizer:Optimizer.load_state_dict",
    needs=("state_dict",),
    reason="a checkpoint can change dtypes: the next step is proven again",
    lost="a resumed run is not proven again after its checkpoint was loaded",
    check=checks.step,
)
def _load_state_dict(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.states_loaded(self, args[0] if args else kwargs.get("state_dict", {}))
        return result

    return load_state_dict


@patch(
    "torch.optim.optimizer:Optimizer.add_param_group",
    needs=("param_group",),
    reason="parameters that are added later are proven too",
    lost="parameters that are added to an optimizer later are not proven",
    check=checks.step,
)
def _add_param_group(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def add_param_group(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            if self in guard.optimizers:
                master_weights.keep_in_optimizer(guard, self)
            guard.group_added(self)

    return add_param_group
