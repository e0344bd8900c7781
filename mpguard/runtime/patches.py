"""What is wrapped, and why: one table.

Each patch goes into the defining module as it is imported, and only where the target still has the
parameters that it relies on; where it has not, that is said, the patch is left out, and the proof
decides. Classes stay classes: methods are replaced, and `isinstance`, subclassing and pickling
work as before.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mpguard.errors import ConfigError
from mpguard.plugin import ABSENT, Change, Setting, differences, gathers, merged
from mpguard.runtime import checkpoints, compiling, imports
from mpguard.runtime import guard as guards
from mpguard.runtime.observe import innermost

log = logging.getLogger("mpguard")

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Patch:
    """One wrapped function.

    module, target: where it is defined (`Class.method` or `function`). needs: the parameters that
    the wrapper relies on, its fingerprint. why: with the numbers of the findings behind it (S1 to S25).
    tested: the versions that it was tried with.
    """

    module: str
    target: str
    needs: tuple[str, ...]
    why: str
    tested: str
    wrap: Callable[[Function], Function]


# -- accelerate ----------------------------------------------------------------------------------


def _accelerator(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        guard = guards.current()
        if guard is None:
            original(self, *args, **kwargs)
            return
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given["self"]
        original(self, **_accelerator_arguments(given, guard))
        if guard.plan.policy.low_bit_recipe != "delayed":
            return
        this = weakref.ref(self)  # the hooks are its own

        def load(_models: Any, folder: str) -> None:
            found = this()
            checkpoints.load(found._models if found is not None else (), folder)  # those of FSDP are not handed over

        self.register_save_state_pre_hook(lambda models, _weights, folder: checkpoints.save(models, folder))
        self.register_load_state_pre_hook(load)

    return __init__


def _accelerator_arguments(given: dict[str, Any], guard: guards.Guard) -> dict[str, Any]:
    """The arguments of `Accelerator` with the policy in them; of FP8 the rest, where mpguard converts itself."""
    strategy = _accelerate_strategy(given)
    policy = guard.plan.policy
    guard.converts = not gathers(policy, strategy)
    converts = policy.low_bit_recipe is not None and guard.converts
    with guards.quiet():
        wanted = (policy.replace(fp8=None, fp4=None) if converts else policy).to("accelerate", strategy)
    wanted.pop("deepspeed_plugin", None)  # the run has one of its own; `deepspeed.initialize` gets the policy
    fsdp = wanted.pop("fsdp_plugin", None)
    mode = wanted["mixed_precision"]
    before = given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    if converts:
        os.environ.pop("ACCELERATE_FP8_BACKEND", None)  # heeded in other modes too (S10)
    if str(before).lower() not in (mode, "fp8" if converts else mode):
        guard.say_change("Accelerator", Change("mixed_precision", str(before), mode))
    os.environ["ACCELERATE_MIXED_PRECISION"] = mode  # read again by its plugins and by transformers
    result = {**given, "mixed_precision": mode}
    handlers = _handlers(list(given.get("kwargs_handlers") or []), wanted.get("kwargs_handlers", []), guard)
    if handlers or given.get("kwargs_handlers"):
        result["kwargs_handlers"] = handlers
    if fsdp is not None:
        result["fsdp_plugin"] = _fsdp_plugin(given.get("fsdp_plugin"), fsdp.mixed_precision_policy, guard)
    if "dynamo_backend" in wanted:
        if given.get("dynamo_plugin") is not None or given.get("dynamo_backend") is not None:
            guard.say_change(
                "Accelerator", Change("dynamo_backend", "the script's", wanted["dynamo_backend"], "compile")
            )
        result["dynamo_backend"] = wanted["dynamo_backend"]
        result.pop("dynamo_plugin", None)
    elif (chosen := compiling.choice(policy)).on is not None and chosen.on != _compiles(given):
        if chosen.on:
            guard.say(f"mpguard: compile: auto is on here: {chosen.why}")
        else:
            guard.say_change("Accelerator", Change("dynamo_backend", "the script's", "no", chosen.why))
        result["dynamo_backend"] = "inductor" if chosen.on else "no"
        result.pop("dynamo_plugin", None)
    return result


def _compiles(given: Mapping[str, Any]) -> bool:
    """Whether an `Accelerator` with these arguments, or accelerate's variables, would compile models."""
    plugin = given.get("dynamo_plugin")
    backend = given.get("dynamo_backend") or getattr(plugin, "backend", None)
    backend = backend or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    return str(getattr(backend, "value", backend)).lower() != "no"


def _accelerate_strategy(given: Mapping[str, Any]) -> str | None:
    """Which engine this `Accelerator` will ask for, from its arguments and accelerate's variables."""

    def flag(name: str) -> bool:
        return os.environ.get(name, "false").lower() in ("true", "1")

    fsdp = given.get("fsdp_plugin")
    if fsdp is not None or flag("ACCELERATE_USE_FSDP"):
        version = getattr(fsdp, "fsdp_version", None) or os.environ.get("FSDP_VERSION", "1")
        return f"fsdp{version}"
    if given.get("deepspeed_plugin") or given.get("deepspeed_plugins") or flag("ACCELERATE_USE_DEEPSPEED"):
        guard = guards.current()
        asked = guard.plan.strategy if guard else None
        return asked if asked and asked.startswith("deepspeed") else "deepspeed-zero2"
    return "ddp" if int(os.environ.get("WORLD_SIZE") or 1) > 1 else "single"


def _handlers(given: list[Any], wanted: list[Any], guard: guards.Guard) -> list[Any]:
    """The script's handlers with the policy's values; FP8 handlers other than the policy's go."""
    result = []
    kinds = {type(handler): handler for handler in wanted}
    for handler in given:
        ours = kinds.pop(type(handler), None)
        name = type(handler).__name__
        if ours is None:
            if name.endswith("RecipeKwargs"):
                guard.say_change(
                    "Accelerator",
                    Change(f"kwargs_handlers.{name}", "the script's", ABSENT, "the policy's FP8 recipe is another"),
                )
                continue
            result.append(handler)
            continue
        plain = type(handler)() if not name.endswith("RecipeKwargs") else None
        for field in dataclasses.fields(ours):
            new, old = getattr(ours, field.name), getattr(handler, field.name)
            if new == old or (plain is not None and new == getattr(plain, field.name)):
                continue
            guard.say_change("Accelerator", Change(f"{name}.{field.name}", old, new))
            setattr(handler, field.name, new)
        result.append(handler)
    return result + list(kinds.values())


def _fsdp_plugin(given: Any, wanted: Any, guard: guards.Guard) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = given if given is not None else FullyShardedDataParallelPlugin()
    before = plugin.mixed_precision_policy
    if before is not None and before != wanted:
        guard.say_change("Accelerator", Change("fsdp_plugin.mixed_precision_policy", before, wanted))
    plugin.mixed_precision_policy = wanted
    return plugin


# -- transformers --------------------------------------------------------------------------------


def _trainer(parameter: str, act: Callable[..., None]) -> Callable[[Function], Function]:
    """A wrapper of what saves or loads the optimizer's state of a Trainer: the FP8 history goes with it."""

    def wrap(original: Function) -> Function:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            folder = signature.bind(self, *args, **kwargs).arguments[parameter]
            if guards.current() is not None and folder is not None:
                act([self.model], folder)
            return result

        return wrapped

    return wrap


def _trainer_and_deepspeed(original: Function) -> Function:
    """`TrainingArguments` say no precision under mpguard, and a DeepSpeed config that does would be a mismatch."""

    @functools.wraps(original)
    def trainer_config_process(self: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None:
            for field in ("bf16", "fp16"):
                asked = getattr(guard.plan.policy, field)
                if getattr(args, field) and not asked:
                    guard.say_change("TrainingArguments", Change(field, True, False))
                setattr(args, field, asked)
        return original(self, args, *more, **kwargs)

    return trainer_config_process


# -- DeepSpeed -----------------------------------------------------------------------------------


def _deepspeed_initialize(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None:
            return original(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        guard.engine_depth += 1  # ZeRO steps its optimizer once to allocate states
        try:
            made = original(**_deepspeed_arguments(given, guard))
        finally:
            guard.engine_depth -= 1
        if guard.waiting:
            guard.recorder.engines.append(made[0])
        return made

    return initialize


def _deepspeed_arguments(given: dict[str, Any], guard: guards.Guard) -> dict[str, Any]:
    """The arguments of `deepspeed.initialize` with the policy in the config."""
    config, where = given.get("config"), "deepspeed.initialize"
    if config is None:
        config = given.pop("config_params", None)
    arguments: Any = given.get("args")
    if config is None and getattr(arguments, "deepspeed_config", None) is not None:
        config = arguments.deepspeed_config
        given["args"] = copy.copy(arguments)
        given["args"].deepspeed_config = None
    if config is None:
        return given
    if isinstance(config, (str, os.PathLike)):
        where, config = str(config), _deepspeed_file(str(config))
    plain = getattr(config, "_param_dict", getattr(config, "config", config))  # a DeepSpeedConfig, or HF's
    if not isinstance(plain, Mapping):
        raise ConfigError(f"deepspeed.initialize: config is a {type(config).__name__}; a dict or a file is needed")
    with guards.quiet():
        changes = differences(plain, guard.plan.policy, "deepspeed")
    for change in changes:
        if change.overrides:
            guard.say_change(where, change)
    return {**given, "config": merged(plain, {change.key: Setting(change.new) for change in changes})}


def _deepspeed_file(name: str) -> dict[str, Any]:
    """A DeepSpeed config by path, or as base64 or JSON text, as DeepSpeed takes it."""
    from mpguard.document import read

    if Path(name).is_file():
        return read(Path(name)).require()
    try:
        import base64

        loaded = json.loads(base64.urlsafe_b64decode(name).decode("utf-8"))
    except (ValueError, UnicodeDecodeError):
        raise ConfigError(f"{name}: is no file; deepspeed.initialize needs a DeepSpeed config") from None
    return dict(loaded)


def _engine_step(original: Function) -> Function:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.waiting:
            return original(self, *args, **kwargs)
        skipped = self.skipped_steps
        guard.engine_depth += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            guard.engine_depth -= 1
        if self.was_step_applied():
            scaler = _engine_scaler(self)
            if scaler is not None:
                guard.recorder.scalers[id(innermost(self.basic_optimizer))] = scaler
            guard.step_applied(self.basic_optimizer, self)
        elif self.skipped_steps > skipped:
            guard.step_skipped()
        return result

    return step


def _engine_scaler(engine: Any) -> dict[str, Any] | None:
    if not engine.fp16_enabled():
        return None
    optimizer = engine.optimizer
    dynamic = bool(getattr(optimizer, "dynamic_loss_scale", True))
    scale: Any = getattr(optimizer, "loss_scale", None) or getattr(optimizer, "cur_scale", 0.0)
    window = engine.dynamic_loss_scale_args() or {}
    return {
        "kind": "DeepSpeed's loss scaler",
        "enabled": True,
        "scale": float(scale),
        "window": window.get("scale_window") if dynamic else None,
    }


# -- torch ---------------------------------------------------------------------------------------


def _mixed_precision(target: str, parameter: str, fields: tuple[str, ...]) -> Callable[[Function], Function]:
    """A wrapper that puts the policy's dtypes into the mixed precision object of FSDP 1 or 2."""

    def wrap(original: Function) -> Function:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            guard = guards.current()
            if guard is None:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            with guards.quiet():
                wanted = guard.plan.policy.to(target)
            given = bound.arguments.get(parameter)
            bound.arguments[parameter] = _with_dtypes(given, wanted, fields, target, guard)
            if target == "fsdp1" and guard.plan.policy.low_bit_recipe and not bound.arguments.get("use_orig_params"):
                why = "FP8 layers need a weight of their own"
                guard.say_change("FullyShardedDataParallel", Change("use_orig_params", False, True, why))
                bound.arguments["use_orig_params"] = True
            return original(*bound.args, **bound.kwargs)

        return wrapped

    return wrap


def _with_dtypes(given: Any, wanted: Any, fields: tuple[str, ...], target: str, guard: guards.Guard) -> Any:
    if given is None:
        return wanted
    new = {field: value for field in fields if (value := getattr(wanted, field)) is not None}
    for field, value in new.items():
        old = getattr(given, field)
        if old is not None and old != value:
            guard.say_change(target, Change(field, str(old).removeprefix("torch."), str(value).removeprefix("torch.")))
    return dataclasses.replace(given, **new)


def _scaler_init(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        guard = guards.current()
        bound = signature.bind(self, *args, **kwargs)
        if guard is not None and guard.plan.policy.fp16 and bound.arguments.get("enabled", True):
            with guards.quiet():
                wanted = guard.plan.policy.to("torch")
            for name, value in wanted.scaling.items():
                old = bound.arguments.get(name)
                if old is not None and old != value:
                    guard.say_change("GradScaler", Change(name, old, value))
                bound.arguments[name] = value
            original(*bound.args, **bound.kwargs)
            wanted.hold(self)
            return
        original(*bound.args, **bound.kwargs)

    return __init__


def _scaler_step(original: Function) -> Function:
    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.waiting:
            return original(self, optimizer, *args, **kwargs)
        enabled = self.is_enabled()
        recorder = guard.recorder
        recorder.scaler = self if enabled else None
        recorder.scalers[id(innermost(optimizer))] = {
            "kind": type(self).__name__,
            "enabled": enabled,
            "scale": self.get_scale(),
            "window": self.get_growth_interval() if enabled and self.get_growth_factor() >= 1.5 else None,
        }
        before = guard.stepped, recorder.skipped
        try:
            result = original(self, optimizer, *args, **kwargs)
        finally:
            recorder.scaler = None
        if enabled and guard.waiting and (guard.stepped, recorder.skipped) == before:
            guard.step_skipped()
        return result

    return step


def _scaler_scale(original: Function) -> Function:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        guard = guards.current()
        if guard is not None and guard.waiting and self.is_enabled():
            guard.recorder.scaled(result)
        return result

    return scale


def _backward(original: Function) -> Function:
    @functools.wraps(original)
    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is None or not guard.waiting:
            return original(t_outputs, *args, **kwargs)
        guard.check_patience()
        with guard.recorder.passing(t_outputs, bool(kwargs.get("accumulate_grad"))):
            return original(t_outputs, *args, **kwargs)

    return run


def _compiled_graph(original: Function) -> Function:
    @functools.wraps(original)
    def call_user_compiler(self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None and guard.waiting:
            guard.recorder.graph(gm)
        return original(self, gm, *args, **kwargs)

    return call_user_compiler


def _optimizer_init(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.convert(self)

    return __init__


def _load_state_dict(original: Function) -> Function:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        guard = guards.current()
        if guard is not None:
            guard.rearm()
        return result

    return load_state_dict


def _module_load_state_dict(original: Function) -> Function:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.current()
        if guard is not None and guard.plan.policy.low_bit_recipe == "delayed":
            from mpguard.conversion import history

            history.keep(self, state_dict)
        return original(self, state_dict, *args, **kwargs)

    return load_state_dict


PATCHES = (
    Patch(
        "accelerate.accelerator",
        "Accelerator.__init__",
        (
            "mixed_precision", "kwargs_handlers", "fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins",
            "dynamo_plugin", "dynamo_backend",
        ),
        "the YAML has no place for the FSDP policy (S12, S13), loss scaling or torchao (S17); code beats it (S11)",
        "accelerate 1.15.0",
        _accelerator,
    ),
    Patch(
        "transformers.trainer",
        "Trainer._save_optimizer_and_scheduler",
        ("output_dir",),
        "its checkpoints hold weights as bare tensors: the history of delayed scaling is saved beside them",
        "transformers 5.23.0",
        _trainer("output_dir", checkpoints.save),
    ),
    Patch(
        "transformers.trainer",
        "Trainer._load_optimizer_and_scheduler",
        ("checkpoint",),
        "and put back",
        "transformers 5.23.0",
        _trainer("checkpoint", checkpoints.load),
    ),
    Patch(
        "transformers.integrations.deepspeed",
        "HfTrainerDeepSpeedConfig.trainer_config_process",
        ("args",),
        "it refuses a DeepSpeed config that says the precision where TrainingArguments do not",
        "transformers 5.23.0",
        _trainer_and_deepspeed,
    ),
    Patch(
        "deepspeed",
        "initialize",
        ("args", "config", "config_params"),
        "reduction and master dtypes have a place only in its config; `auto` and a missing section mean FP32 (S8, S9)",
        "deepspeed 0.19.8",
        _deepspeed_initialize,
    ),
    Patch(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.step",
        ("self",),
        "ZeRO steps its optimizer per group, and skips steps without a log: the engine alone knows what was applied",
        "deepspeed 0.19.8",
        _engine_step,
    ),
    Patch(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel.__init__",
        ("mixed_precision",),
        "without a policy FSDP reduces in the parameters' dtype (S13)",
        "torch 2.13.0",
        _mixed_precision("fsdp1", "mixed_precision", ("param_dtype", "reduce_dtype", "buffer_dtype")),
    ),
    Patch(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "fully_shard",
        ("mp_policy",),
        "without a policy FSDP2 reduces in the parameters' dtype (S13)",
        "torch 2.13.0",
        _mixed_precision("fsdp2", "mp_policy", ("param_dtype", "reduce_dtype", "output_dtype")),
    ),
    Patch(
        "torch.amp.grad_scaler",
        "GradScaler.__init__",
        ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
        "loss scaling of a loop of one's own",
        "torch 2.13.0",
        _scaler_init,
    ),
    Patch(
        "torch.amp.grad_scaler",
        "GradScaler.step",
        ("optimizer",),
        "whether a step was applied, and which scaler scaled it",
        "torch 2.13.0",
        _scaler_step,
    ),
    Patch(
        "torch.amp.grad_scaler",
        "GradScaler.scale",
        ("outputs",),
        "whether what goes backward has been scaled",
        "torch 2.13.0",
        _scaler_scale,
    ),
    Patch(
        "torch.distributed.fsdp.sharded_grad_scaler",
        "ShardedGradScaler.scale",
        ("outputs",),
        "the same: FSDP1's scaler has a `scale` of its own",
        "torch 2.13.0",
        _scaler_scale,
    ),
    Patch(
        "torch.autograd.graph",
        "_engine_run_backward",
        ("t_outputs",),
        "the dtypes of the matrix products are in the graph that goes backward, and nowhere else afterwards",
        "torch 2.13.0",
        _backward,
    ),
    Patch(
        "torch._dynamo.output_graph",
        "OutputGraph.call_user_compiler",
        ("gm",),
        "a compiled region is one node of autograd's graph: its products are in dynamo's",
        "torch 2.13.0",
        _compiled_graph,
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer.__init__",
        ("params",),
        "every loop makes an optimizer: the models that it updates become FP8, in each engine (S1, S2, S3, S14, S15)",
        "torch 2.13.0",
        _optimizer_init,
    ),
    Patch(
        "torch.optim.optimizer",
        "Optimizer.load_state_dict",
        ("state_dict",),
        "a checkpoint can bring other dtypes: the next step is proven again",
        "torch 2.13.0",
        _load_state_dict,
    ),
    Patch(
        "torch.nn.modules.module",
        "Module.load_state_dict",
        ("state_dict",),
        "weights that are loaded before the optimizer is built come before the conversion: their FP8 history is kept",
        "torch 2.13.0",
        _module_load_state_dict,
    ),
)  # fmt: skip


def apply() -> None:
    """Has every patch made as its module is imported; at once where it has been."""
    for patch in PATCHES:
        imports.after(patch.module, functools.partial(_make, patch))
    # Our frames are none of its; those of converted layers are.
    imports.after("torch._dynamo.trace_rules", lambda module: module.add("mpguard.runtime"))


def _make(patch: Patch, module: ModuleType) -> None:
    *path, name = patch.target.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    original = getattr(owner, name, None)
    if original is None or getattr(original, "__mpguard__", False):
        if original is None:
            log.warning(
                "%s has no %s here: not wrapped; the proof decides (tested with %s)",
                patch.module,
                patch.target,
                patch.tested,
            )
        return
    missing = [parameter for parameter in patch.needs if parameter not in inspect.signature(original).parameters]
    if missing:
        log.warning(
            "%s.%s has no parameter %s here: not wrapped; the proof decides (tested with %s)",
            patch.module, patch.target, ", ".join(missing), patch.tested,
        )  # fmt: skip
        return
    wrapped = patch.wrap(original)
    wrapped.__mpguard__ = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    if not path:
        _replace_imported(name, original, wrapped)


def _replace_imported(name: str, original: Any, wrapped: Any) -> None:
    """A function that other modules have taken already is replaced there too."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and namespace.get(name) is original:
            namespace[name] = wrapped
