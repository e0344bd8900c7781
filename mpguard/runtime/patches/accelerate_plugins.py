"""Put the policy into the arguments and plugins of `Accelerator`, and record `LocalSGD`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import weakref
from collections.abc import Mapping
from typing import Any

from mpguard.core.patches import AnyFunction, patch
from mpguard.nn import compile as compilation
from mpguard.policy.policy import Policy
from mpguard.runtime import checkpoints
from mpguard.runtime import guard as guards
from mpguard.runtime.patches import checks, fp8_conversion, required
from mpguard.runtime.patches.compile_models import reporting_failures
from mpguard.runtime.plan import with_first_scale
from mpguard.runtime.ranks import processes
from mpguard.targets.capabilities import fp8_weights, slower_demand
from mpguard.targets.inject import Change, build
from mpguard.targets.settings import ABSENT

#: Accelerators that compile models because the policy requires it, or `auto` has selected it.
_compiled_for_policy: weakref.WeakSet[Any] = weakref.WeakSet()


@patch(
    "accelerate.accelerator:Accelerator.__init__",
    needs=(
        "mixed_precision",
        "kwargs_handlers",
        "fsdp_plugin",
        "deepspeed_plugin",
        "deepspeed_plugins",
        "dynamo_plugin",
        "dynamo_backend",
    ),
    reason="the YAML has no key for the FSDP policy (S12, S13), loss scaling or torchao (S17); code overrides it (S11)",
    lost="accelerate computes in its own precision, without the policy's FSDP dtypes and loss scaling",
    check=checks.accelerator,
    required=required.any_policy,
)
def _accelerator(original: AnyFunction) -> AnyFunction:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        guard = guards.current()
        if guard is None:
            original(self, *args, **kwargs)
            return
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given["self"]
        wanted = _accelerator_arguments(given, guard)
        original(self, **wanted)
        if wanted.get("dynamo_backend") not in (None, "no", given.get("dynamo_backend")):
            _compiled_for_policy.add(self)
        _enable_fp16_on_cpu(self)
        if guard.plan.policy.low_bit_recipe != "delayed":
            return
        this = weakref.ref(self)  # not a strong reference: the accelerator holds its hooks, which would be a cycle

        def load(_models: Any, folder: str) -> None:
            accelerator = this()
            # Not `_models`: accelerate does not pass models under FSDP.
            checkpoints.load(accelerator._models if accelerator is not None else (), folder)

        self.register_save_state_pre_hook(lambda models, _weights, folder: checkpoints.save(models, folder))
        self.register_load_state_pre_hook(load)

    return __init__


def _enable_fp16_on_cpu(accelerator: Any) -> None:
    """Enable autocast and a GradScaler in an `Accelerator` with FP16 on the CPU, which has neither (S34)."""
    if accelerator.device.type != "cpu" or accelerator.mixed_precision != "fp16" or accelerator.scaler is not None:
        return
    if accelerator.state.deepspeed_plugin is None:
        import torch

        handler = accelerator.scaler_handler
        accelerator.scaler = torch.amp.GradScaler("cpu", **({} if handler is None else handler.to_kwargs()))
        accelerator.native_amp = True


def _accelerator_arguments(given: dict[str, Any], guard: guards.Guard) -> dict[str, Any]:
    """Return the arguments of `Accelerator` with the policy in them; without FP8 if mpguard converts the models."""
    strategy = _accelerate_strategy(given)
    policy = guard.plan.policy
    gathered = fp8_conversion.keeps_fp8_weights(guard, strategy) and fp8_weights(policy, strategy) == "torchao"
    cost = slower_demand(policy, strategy, processes())
    if cost is not None and not guard.plan.announced:
        guard.reporter.print_once(f"mpguard: fp8_param: true costs time here: {cost}")
    guard.converts_models, guard.compiles_models = not gathered, False
    converts = policy.low_bit_recipe is not None and guard.converts_models
    without_fp8 = policy.replace(fp8=None, fp4=None) if converts else policy
    wanted = build(with_first_scale(without_fp8), "accelerate", strategy, warn=False)
    wanted.pop("deepspeed_plugin", None)  # the run keeps its own plugin; `deepspeed.initialize` gets the policy
    fsdp = wanted.pop("fsdp_plugin", None)
    mode = wanted["mixed_precision"]
    before = given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    if converts:
        os.environ.pop("ACCELERATE_FP8_BACKEND", None)  # accelerate applies it in other modes too (S10)
    if str(before).lower() not in (mode, "fp8" if converts else mode):
        guard.reporter.log_override("Accelerator", Change("mixed_precision", str(before), mode))
    os.environ["ACCELERATE_MIXED_PRECISION"] = mode  # its plugins and transformers read it again
    result = {**given, "mixed_precision": mode}
    handlers = _handlers(list(given.get("kwargs_handlers") or []), wanted.get("kwargs_handlers", []), guard)
    if handlers or given.get("kwargs_handlers"):
        result["kwargs_handlers"] = handlers
    if fsdp is not None:
        result["fsdp_plugin"] = _fsdp_plugin(given.get("fsdp_plugin"), fsdp.mixed_precision_policy, guard)
    if "dynamo_backend" in wanted:
        if given.get("dynamo_plugin") is not None or given.get("dynamo_backend") is not None:
            guard.reporter.log_override(
                "Accelerator", Change("dynamo_backend", "the script's", wanted["dynamo_backend"], "compile")
            )
        result["dynamo_backend"] = wanted["dynamo_backend"]
        result.pop("dynamo_plugin", None)
    elif (chosen := _compile_choice(policy, gathered)).on is not None and chosen.on != _compiles(given):
        if chosen.on:
            guard.reporter.print_once(f"mpguard: compile: auto is on here: {chosen.reason}")
        else:
            guard.reporter.log_override("Accelerator", Change("dynamo_backend", "the script's", "no", chosen.reason))
        result["dynamo_backend"] = "inductor" if chosen.on else "no"
        result.pop("dynamo_plugin", None)
    return result


def _compile_choice(policy: Policy, gathered: bool) -> compilation.Choice:
    """Return what `auto` selects. gathered: torchao gathers weights in FP8, which takes twice as long uncompiled."""
    return compilation.choice(policy.replace(backend="torchao", name=policy.name) if gathered else policy)


def _compiles(given: Mapping[str, Any]) -> bool:
    """True if an `Accelerator` with these arguments, or accelerate's environment variables, would compile models."""
    plugin = given.get("dynamo_plugin")
    backend = given.get("dynamo_backend") or getattr(plugin, "backend", None)
    backend = backend or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    return str(getattr(backend, "value", backend)).lower() != "no"


def _accelerate_strategy(given: Mapping[str, Any]) -> str | None:
    """Return the engine of this `Accelerator`, from its arguments and accelerate's environment variables."""

    def flag(name: str) -> bool:
        return os.environ.get(name, "false").lower() in ("true", "1")

    fsdp = given.get("fsdp_plugin")
    if fsdp is not None or flag("ACCELERATE_USE_FSDP"):
        version = getattr(fsdp, "fsdp_version", None) or os.environ.get("FSDP_VERSION", "1")
        return f"fsdp{version}"
    if given.get("deepspeed_plugin") or given.get("deepspeed_plugins") or flag("ACCELERATE_USE_DEEPSPEED"):
        guard = guards.current()
        planned = guard.plan.strategy if guard else None
        return planned if planned and planned.startswith("deepspeed") else "deepspeed-zero2"
    return "ddp" if int(os.environ.get("WORLD_SIZE") or 1) > 1 else "single"


@patch(
    "accelerate.accelerator:Accelerator.prepare",
    needs=("args", "device_placement"),
    reason="compiling all blocks of a deep model as one graph takes minutes (benchmarks/results/compile_depth.json)",
    lost="all blocks of a deep model are compiled as one graph, which takes minutes",
    check=checks.accelerator,
)
def _prepare(original: AnyFunction) -> AnyFunction:
    """Compile deep models block by block, in place: accelerate's own regions are copies of the model's modules."""

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None and self in _compiled_for_policy:
            import torch

            models = [each for each in args if isinstance(each, torch.nn.Module)]
            failed = reporting_failures(guard)
            if any(compilation.is_deep(model) and compilation.compile_in_place(model, failed) for model in models):
                self.state.dynamo_plugin.backend = type(self.state.dynamo_plugin.backend)("NO")
                for model in models:
                    compilation.compile_in_place(model, failed)
                guard.reporter.print_once("mpguard: the model is compiled in place, block by block")
        return original(self, *args, **kwargs)

    return prepare


def _handlers(given: list[Any], wanted: list[Any], guard: guards.Guard) -> list[Any]:
    """Return the script's handlers with the policy's values; FP8 handlers other than the policy's are removed."""
    result = []
    kinds = {type(handler): handler for handler in wanted}
    for handler in given:
        policys = kinds.pop(type(handler), None)
        name = type(handler).__name__
        if policys is None:
            if name.endswith("RecipeKwargs"):
                guard.reporter.log_override(
                    "Accelerator",
                    Change(f"kwargs_handlers.{name}", "the script's", ABSENT, "the policy has another FP8 recipe"),
                )
                continue
            result.append(handler)
            continue
        default = type(handler)() if not name.endswith("RecipeKwargs") else None
        for field in dataclasses.fields(policys):
            new, old = getattr(policys, field.name), getattr(handler, field.name)
            if new == old or (default is not None and new == getattr(default, field.name)):
                continue
            guard.reporter.log_override("Accelerator", Change(f"{name}.{field.name}", old, new))
            setattr(handler, field.name, new)
        result.append(handler)
    return result + list(kinds.values())


def _fsdp_plugin(given: Any, wanted: Any, guard: guards.Guard) -> Any:
    """Return the script's FSDP plugin, or a new one, with the policy's mixed precision."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = given if given is not None else FullyShardedDataParallelPlugin()
    before = plugin.mixed_precision_policy
    if before is not None and before != wanted:
        guard.reporter.log_override("Accelerator", Change("fsdp_plugin.mixed_precision_policy", before, wanted))
    plugin.mixed_precision_policy = wanted
    return plugin


@patch(
    "accelerate.local_sgd:LocalSGD.__enter__",
    needs=("self",),
    reason="gradients are not reduced inside it, which is right there: it averages the weights",
    lost="gradients that differ between ranks are refused inside of LocalSGD",
    check=checks.accelerator,
)
def _local_sgd(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        guard = guards.current()
        if guard is not None and self.enabled:
            guard.recorder.averaging = f"LocalSGD, every {self.local_sgd_steps} steps"
        return original(self)

    return __enter__


@patch(
    "accelerate.local_sgd:LocalSGD.__exit__",
    needs=("self",),
    reason="the end of that",
    lost="gradients that differ between ranks pass after LocalSGD",
    check=checks.accelerator,
)
def _local_sgd_end(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def __exit__(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        guard = guards.current()
        if guard is not None:
            guard.recorder.averaging = None
        return result

    return __exit__
