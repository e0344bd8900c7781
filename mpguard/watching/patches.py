"""The functions of torch, DeepSpeed and accelerate that show losses, skipped steps, norms and loss scales.

The wrappers change nothing: they call the original exactly once with the caller's arguments, and return its result.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mpguard.core import patches
from mpguard.core.patches import WATCHING, AnyFunction, Patch, patch
from mpguard.nn.compile import untraced
from mpguard.runtime.patches import checks, import_hooks
from mpguard.runtime.patches.table import apply_patch
from mpguard.watching.containment import CONTAINMENT
from mpguard.watching.current import current


@functools.cache
def apply() -> None:
    """Apply each patch when its module is imported, and observe the steps of optimizers; once per process."""
    for each in PATCHES:
        hook = CONTAINMENT.contained_hook(functools.partial(_apply, each), each.module)
        import_hooks.after(each.module, hook)
    import_hooks.after("torch", _hook_optimizers)
    # Dynamo must not trace frames of these packages.
    import_hooks.after("torch._dynamo.trace_rules", lambda module: module.add("mpguard.watching"))
    import_hooks.after("torch._dynamo.trace_rules", lambda module: module.add("mpguard.runtime"))


def _apply(each: Patch, module: ModuleType) -> None:
    apply_patch(each, module, CONTAINMENT)


def _hook_optimizers(_torch: ModuleType) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        watch = current()
        if watch is not None:
            with CONTAINMENT.contained("the check of gradients"), no_grad():
                watch.before_step(optimizer)

    def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        watch = current()
        if watch is not None:
            with CONTAINMENT.contained("the end of a step"), no_grad():
                watch.after_step(optimizer)

    register_optimizer_step_pre_hook(_eager(before))
    register_optimizer_step_post_hook(_eager(after))


def _eager(hook: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Return a hook that dynamo does not trace if it traces the step; else it is called without dynamo's wrapper."""
    import torch

    hidden, is_compiling = untraced(hook), torch.compiler.is_compiling

    def call(optimizer: Any, args: Any, kwargs: Any) -> None:
        (hidden if is_compiling() else hook)(optimizer, args, kwargs)

    return call


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which nothing is recorded for gradients."""
    import torch

    return torch.no_grad()


@patch(
    "torch.autograd.graph:_engine_run_backward",
    needs=("t_outputs",),
    reason="the loss that a backward pass begins from",
    lost="losses are not watched",
    check=checks.step,
    part=WATCHING,
)
def _backward(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current()
        if watch is None or not kwargs.get("accumulate_grad"):
            return original(t_outputs, *args, **kwargs)
        with no_grad():
            outermost = watch.backward_started(t_outputs)
        try:
            return original(t_outputs, *args, **kwargs)
        finally:
            if outermost:
                watch.backward_ended()

    return run


@patch(
    "torch.amp.grad_scaler:GradScaler.scale",
    needs=("outputs",),
    reason="shows that the loss of the next backward pass is scaled",
    lost="losses are watched with the loss scale in them",
    check=checks.scaled_step,
    part=WATCHING,
)
def _scaler_scale(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        watch = current()
        if watch is not None and self.is_enabled():
            watch.loss_scaled(self)
        return result

    return scale


@patch(
    "torch.amp.grad_scaler:GradScaler.step",
    needs=("optimizer",),
    reason="shows if a step was skipped, and the loss scale",
    lost="skipped steps and loss scales are not watched",
    check=checks.scaled_step,
    part=WATCHING,
)
def _scaler_step(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current()
        if watch is None:
            return original(self, optimizer, *args, **kwargs)
        calls = watch.scaler_steps(self)
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException:
            watch.scaler_failed()
            raise
        with no_grad():
            watch.scaler_stepped(self, optimizer, calls)
        return result

    return step


@patch(
    "torch.nn.utils.clip_grad:clip_grad_norm_",
    needs=("norm_type",),
    reason="the norm that it computes need not be computed again",
    lost="norms of gradients are computed again",
    check=checks.clipped,
    part=WATCHING,
)
@patch(
    "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.clip_grad_norm_",
    needs=("norm_type",),
    reason="the same for FSDP1, over all ranks",
    lost="norms of gradients are computed again",
    check=checks.fsdp1,
    part=WATCHING,
)
def _clip(original: AnyFunction) -> AnyFunction:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        watch = current()
        if watch is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            with no_grad():
                watch.clipped(norm, bound.arguments["norm_type"])
        return norm

    return clip_grad_norm_


@patch(
    "deepspeed.runtime.engine:DeepSpeedEngine.backward",
    needs=(),
    reason="the loss before it is scaled",
    lost="losses of DeepSpeed are not watched",
    check=checks.deepspeed_engine,
    part=WATCHING,
)
def _engine_backward(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current()
        if watch is not None:
            loss, _, scales = (*args, *(None,) * 3)[:3]
            scales = kwargs.get("scale_wrt_gas", True) if scales is None else scales
            with no_grad():
                watch.loss_given(kwargs.get("loss", loss), self.gradient_accumulation_steps() if scales else 1)
        return original(self, *args, **kwargs)

    return backward


@patch(
    "deepspeed.runtime.engine:DeepSpeedEngine.step",
    needs=("self",),
    reason="the engine alone records which steps it skips",
    lost="steps that DeepSpeed skips are not watched",
    check=checks.deepspeed_engine,
    part=WATCHING,
)
def _engine_step(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current()
        if watch is None:
            return original(self, *args, **kwargs)
        skipped = self.skipped_steps
        with no_grad():
            watch.before_engine_step(self)
        watch.engine_depth += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            watch.engine_depth -= 1
        if self.was_step_applied() or self.skipped_steps > skipped:
            with no_grad():
                watch.engine_stepped(self, skipped=self.skipped_steps > skipped)
        return result

    return step


@patch(
    "accelerate.accelerator:Accelerator.init_trackers",
    needs=(),
    reason="the trackers that the script has started",
    lost="trackers of accelerate get no values of the watch",
    check=checks.accelerator,
    part=WATCHING,
)
def _init_trackers(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def init_trackers(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        watch = current()
        if watch is not None:
            watch.analysis.trackers.follow(self)
        return result

    return init_trackers


@patch(
    "accelerate.accelerator:Accelerator.end_training",
    needs=(),
    reason="it closes the trackers",
    lost="the watch may write to trackers that are closed",
    check=checks.accelerator,
    part=WATCHING,
)
def _end_training(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def end_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = current()
        if watch is not None:
            with no_grad():
                watch.conclude_all()
            watch.analysis.trackers.follow(None)
        return original(self, *args, **kwargs)

    return end_training


PATCHES = tuple(each for each in patches.PATCHES if each.part == WATCHING)
