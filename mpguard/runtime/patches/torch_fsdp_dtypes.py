"""Put the policy's dtypes into FSDP1 and FSDP2, and keep parameters that an optimizer already has."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.policy.allow import FP32
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks, fp8_conversion, fp32_modules, master_weights, required
from mpguard.runtime.proof.observe import updated_by
from mpguard.targets.inject import Change, build


def _mixed_precision(target: str, parameter: str, fields: tuple[str, ...]) -> Callable[[AnyFunction], AnyFunction]:
    """Return a wrapper that puts the policy's dtypes into the mixed precision object of FSDP 1 or 2.

    target: the plugin (`fsdp1`, `fsdp2`). parameter: the argument that takes the object. fields: its dtypes.
    """

    def wrap(original: AnyFunction) -> AnyFunction:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            guard = guards.current()
            if guard is None:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            given_module = bound.arguments["module"]
            models = given_module if isinstance(given_module, list) else [given_module]
            fp8_conversion.keeps_fp8_weights(guard, target, models=models)
            master_weights.leave_to_engine(guard, models)
            for model in models:
                guard.recorder.record_weights(model.parameters())
            wanted = build(guard.plan.policy, target, warn=False)
            given = bound.arguments.get(parameter)
            bound.arguments[parameter] = _with_dtypes(given, wanted, fields, target, guard)
            if target == "fsdp1" and not bound.arguments.get("use_orig_params"):
                reason = _reason_for_orig_params(guard, bound.arguments["module"])
                if reason:
                    change = Change("use_orig_params", False, True, reason)
                    guard.reporter.log_override("FullyShardedDataParallel", change)
                    bound.arguments["use_orig_params"] = True
            if target == "fsdp1":
                fp32_modules.fsdp1_arguments(guard, type(bound.arguments["self"]), bound.arguments)
            elif not fp32_modules.fully_shard_separately(guard, original, bound.arguments):
                return given_module
            return original(*bound.args, **bound.kwargs)

        return wrapped

    return wrap


def _with_dtypes(given: Any, wanted: Any, fields: tuple[str, ...], target: str, guard: guards.Guard) -> Any:
    """Return a mixed precision object with the policy's dtypes, and log what is overridden.

    A unit in FP32 stays so if the run allows modules in FP32: which they are, the proof compares.
    """
    if given is None:
        return wanted
    new = {field: value for field in fields if (value := getattr(wanted, field)) is not None}
    if str(given.param_dtype) == "torch.float32" and any(each.kind == FP32 for each in guard.plan.allow):
        new.pop("param_dtype", None)
    for field, value in new.items():
        old = getattr(given, field)
        if old is not None and old != value:
            change = Change(field, str(old).removeprefix("torch."), str(value).removeprefix("torch."))
            guard.reporter.log_override(target, change)
    return dataclasses.replace(given, **new)


def _reason_for_orig_params(guard: guards.Guard, model: Any) -> str:
    """Return why FSDP1 must keep the original parameters of a model instead of flat ones; empty if it need not."""
    if guard.plan.policy.low_bit_recipe:
        return "FP8 layers need their own weights"
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(each) in own for optimizer in guard.optimizers for each in updated_by(optimizer)):
        return "an optimizer that was created before would step parameters that are no longer trained"
    return ""


patch(
    "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.__init__",
    needs=("module", "mixed_precision", "use_orig_params"),
    reason="without a policy FSDP reduces in the parameters' dtype (S13); an earlier optimizer trains nothing (S32)",
    lost="the gradients of FSDP are reduced in the dtype that the script gives, and the proof compares it",
    check=checks.fsdp1,
    required=required.with_fsdp1,
)(_mixed_precision("fsdp1", "mixed_precision", ("param_dtype", "reduce_dtype", "buffer_dtype")))


patch(
    "torch.distributed.fsdp._fully_shard._fully_shard:fully_shard",
    needs=("mp_policy",),
    reason="without a policy FSDP2 reduces in the parameters' dtype (S13)",
    lost="the gradients of FSDP are reduced in the dtype that the script gives, and the proof compares it",
    check=checks.fsdp2,
    required=required.with_fsdp2,
)(_mixed_precision("fsdp2", "mp_policy", ("param_dtype", "reduce_dtype", "output_dtype")))
