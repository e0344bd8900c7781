"""Put the policy's loss scaling into GradScalers, and record what they scale and skip, and who sets the scale."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import casts
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks, required
from mpguard.runtime.plan import first_scale
from mpguard.runtime.proof.observe import innermost
from mpguard.runtime.proof.samples import safely
from mpguard.targets.inject import Change, build

#: The largest factor with which a scale still follows overflows: 69 skipped steps halve it.
SLOWEST = 0.99


@patch(
    "torch.amp.grad_scaler:GradScaler.__init__",
    needs=("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    reason="loss scaling of a custom training loop",
    lost="the loss scale is the script's, and the proof compares what it sees of the scaler",
    check=checks.scaled_step,
    required=required.in_fp16,
)
def _scaler_init(original: AnyFunction) -> AnyFunction:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        guard = guards.current()
        bound = signature.bind(self, *args, **kwargs)
        if guard is not None and guard.plan.policy.fp16 and bound.arguments.get("enabled", True):
            policy = guard.plan.policy
            wanted, scaling = build(policy, "torch", warn=False), {}
            if policy.loss_scale is None:
                given = bound.arguments.get("init_scale")
                if given == policy.initial_loss_scale:
                    given = None  # the arguments that mpguard has given accelerate
                guard.first_scale = scaling["init_scale"] = first_scale(policy, given)
                bound.arguments["init_scale"] = given
            for name, value in {**wanted.scaling, **scaling}.items():
                old = bound.arguments.get(name)
                if old is not None and old != value:
                    guard.reporter.log_override("GradScaler", Change(name, old, value))
                bound.arguments[name] = value
            original(*bound.args, **bound.kwargs)
            wanted.set_limits(self)
            return
        original(*bound.args, **bound.kwargs)

    return __init__


@patch(
    "torch.amp.grad_scaler:GradScaler.step",
    needs=("optimizer",),
    reason="shows if a step was applied, and which scaler scaled it",
    lost="the proof does not know which steps a GradScaler has skipped",
    check=checks.scaled_step,
    required=required.in_fp16,
)
def _scaler_step(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.listening:
            return original(self, optimizer, *args, **kwargs)
        guard.scaler_use.scale_found(self)
        if guard.waiting:
            facts, own = _scaler_facts(self), innermost(optimizer)
            recorder = guard.recorder  # another thread may replace it
            passes = recorder.scaled_passes
            facts |= {"set": guard.scaler_use.set_by_script(self, own), "passes": safely(passes.step, self, own) or ""}
            recorder.scalers[id(own)] = facts
        calls = guard.step_calls
        result = original(self, optimizer, *args, **kwargs)
        if self.is_enabled():
            guard.scaler_use.stepped(self, optimizer)
        if guard.step_calls == calls and self.is_enabled():
            guard.step_skipped(optimizer)
            guard.measure(optimizer)
        return result

    return step


@patch(
    "torch.amp.grad_scaler:GradScaler.update",
    needs=("new_scale",),
    reason="shows if a scaler of several optimizers is updated after the step of each",
    lost="a scaler that is updated several times in a step is not reported",
    check=checks.scaled_step,
)
def _scaler_update(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None and guard.listening and self.is_enabled():
            given = args[0] if args else kwargs.get("new_scale")
            guard.scaler_use.scale_updated(self, given)
            remark = guard.scaler_use.updated(self)
            if remark is not None and casts.is_called_by_script():  # Accelerator and Lightning update after each step
                guard.reporter.report_remarks([remark])

    return update


def _scaler_facts(scaler: Any) -> dict[str, Any]:
    enabled = scaler.is_enabled()
    return {
        "kind": type(scaler).__name__,
        "enabled": enabled,
        "scale": scaler.get_scale(),
        "backs_off": not enabled or scaler.get_backoff_factor() <= SLOWEST,
        "backoff": scaler.get_backoff_factor() if enabled else None,
        "window": scaler.get_growth_interval() if enabled and scaler.get_growth_factor() >= 1.5 else None,
        "hysteresis": getattr(scaler, "_hysteresis", 1),
    }


@patch(
    "torch.amp.grad_scaler:GradScaler.scale",
    needs=("outputs",),
    reason="shows if the loss of a backward pass was scaled",
    lost="the proof does not know if the loss of a backward pass was scaled",
    check=checks.scaled_step,
)
@patch(
    "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler.scale",
    needs=("outputs",),
    reason="the same: FSDP1's scaler has its own `scale`",
    lost="the proof does not know if the loss of a backward pass was scaled",
    check=checks.fsdp1_scaler,
)
def _scaler_scale(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        guard = guards.current()
        if guard is not None and guard.waiting and self.is_enabled():
            guard.recorder.record_scaled_loss(result)
            safely(guard.recorder.scaled_passes.loss_scaled, self, outputs, result)
        if guard is not None and guard.meter is not None and self.is_enabled():
            guard.meter.record_unscaled(outputs)
        return result

    return scale


@patch(
    "torch.amp.grad_scaler:GradScaler.load_state_dict",
    needs=("state_dict",),
    reason="shows if a resumed run has loaded its loss scale",
    lost="a resumed run that loses its loss scale is not reported",
    check=checks.scaled_step,
)
def _scaler_load_state_dict(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None and self.is_enabled():
            guard.scaler_use.scale_loaded(self)
            guard.observing_load(lambda: guard.loaded.scaler(self.get_scale()))
        return result

    return load_state_dict
