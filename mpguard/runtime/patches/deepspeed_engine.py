"""Put the policy into DeepSpeed's config, and record which steps its engine applies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.runtime import guard as guards
from mpguard.runtime.first_proof import ENGINE_SCALER
from mpguard.runtime.patches import checks, deepspeed_config, fp8_conversion, fp32_modules, master_weights, required
from mpguard.runtime.proof.observe import innermost
from mpguard.runtime.proof.products import short
from mpguard.runtime.proof.remarks import Remark

#: The method of an engine that tells if the section of its config is in force.
_ENABLED = {"bf16": "bfloat16_enabled", "fp16": "fp16_enabled"}


@patch(
    "deepspeed:initialize",
    needs=("args", "config", "config_params"),
    reason="reduction and master dtypes can only be set in its config; `auto` and a missing section mean FP32 (S8, S9)",
    lost="DeepSpeed computes and reduces in the dtypes of its own config",
    check=checks.deepspeed_engine,
    required=required.with_deepspeed,
)
def _deepspeed_initialize(original: AnyFunction) -> AnyFunction:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None:
            return original(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        model = given.get("model")
        fp8_conversion.keeps_fp8_weights(guard, "DeepSpeed", models=[] if model is None else [model])
        master_weights.leave_to_engine(guard, [] if model is None else [model])
        if model is not None:
            fp32_modules.keep_in_model(guard, [model])
        arguments, changed = deepspeed_config.arguments(given, guard)
        guard.engine_depth += 1  # ZeRO steps its optimizer once to allocate its states
        try:
            result = original(**arguments)
        except (ValueError, AssertionError, NotImplementedError) as error:
            if changed:
                guard.reporter.print_once(
                    f"deepspeed.initialize refuses the run: {error}. The policy `{guard.plan.policy.name}` had changed "
                    f"its config ({changed}): if it runs without that, take another ZeRO stage or recipe"
                )
            raise
        finally:
            guard.engine_depth -= 1
        if refusal := deepspeed_config.muon_states(result[0], guard):
            guard.fail(refusal)
        if guard.waiting:
            guard.recorder.engines.append(result[0])
        return result

    return initialize


@patch(
    "deepspeed.runtime.engine:DeepSpeedEngine.step",
    needs=("self",),
    reason="ZeRO steps its optimizer per group, and skips steps without a log: the engine alone knows what was applied",
    lost="the proof does not know which steps of DeepSpeed were applied",
    check=checks.deepspeed_engine,
    required=required.with_deepspeed,
)
def _engine_step(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.listening:
            return original(self, *args, **kwargs)
        skipped = self.skipped_steps
        guard.engine_depth += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            guard.engine_depth -= 1
        if self.was_step_applied():
            scaler = _engine_scaler(self) if guard.waiting else None
            if scaler is not None:
                guard.recorder.scalers[id(innermost(self.basic_optimizer))] = scaler
            guard.step_applied(self.basic_optimizer, self)
        elif self.skipped_steps > skipped:
            guard.step_skipped(self.basic_optimizer)
        guard.recorder.account.resume()
        if self.was_step_applied() or self.skipped_steps > skipped:
            guard.measure(self.basic_optimizer)
        return result

    return step


@patch(
    "deepspeed.runtime.torch_autocast:autocast_if_enabled",
    needs=("engine",),
    reason="the engine disables an autocast region around it, and logs that once",
    lost="autocast around a DeepSpeed engine is not reported",
    check=checks.deepspeed_engine,
)
def _autocast_in_engine(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def autocast_if_enabled(engine: Any) -> Any:
        guard = guards.current()
        if guard is not None and guard.waiting and engine.module.training:
            guard.reporter.report_remarks(_autocast_around(engine))
        return original(engine)

    return autocast_if_enabled


def _autocast_around(engine: Any) -> Iterator[Remark]:
    """Yield a remark if an engine is called in an autocast region that it does not know of."""
    import torch

    kind = engine.device.type
    if torch.is_grad_enabled() and torch.is_autocast_enabled(kind) and not engine.torch_autocast_enabled():
        section = next((name for name in ("bf16", "fp16") if getattr(engine, _ENABLED[name])()), "FP32")
        dtype = torch.get_autocast_dtype(kind)
        yield Remark(
            "autocast around the engine",
            f"a DeepSpeed engine ({section}) is called inside of `torch.autocast` in {short(dtype)}. On a GPU the "
            "engine disables that for its model, since DeepSpeed 0.17.2; elsewhere both are in force. Remove the "
            "region, or enable `torch_autocast` in the config in place of `bf16` and `fp16`",
            "MPG505",
        )


def _engine_scaler(engine: Any) -> dict[str, Any] | None:
    """Return the facts about the loss scaler of an engine; None without FP16."""
    if not engine.fp16_enabled():
        return None
    optimizer = engine.optimizer
    dynamic = bool(getattr(optimizer, "dynamic_loss_scale", True))
    scale: Any = getattr(optimizer, "loss_scale", None) or getattr(optimizer, "cur_scale", 0.0)
    window = engine.dynamic_loss_scale_args() or {}
    return {
        "kind": ENGINE_SCALER,
        "enabled": True,
        "scale": float(scale),
        "window": window.get("scale_window") if dynamic else None,
    }
