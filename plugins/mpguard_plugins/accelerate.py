"""Accelerate: its YAML, and keyword arguments for `Accelerator`.

The YAML has a mode (`mixed_precision`) and the few FP8 keys that accelerate reads. Everything else (reduction dtype,
loss scale, torchao recipe) can only be set in objects, so the keyword arguments carry more than the file. mpguard's own
keys in the file (`mpguard_recipe`, `mpguard_overrides`) are not settings of accelerate and not written here.

Written for accelerate 1.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpguard import PolicyError
from mpguard.policy import FLOAT8_LINEAR, Backend, Dtype, Policy
from mpguard.targets import ABSENT, Setting, Settings, get, lookup, plugin
from mpguard_plugins import fsdp, torch, torchao

_INSTEAD = "Build the recipe with target `te`, and enter `te.autocast` around the forward pass"


@plugin(
    "accelerate",
    carries=(
        "bf16", "fp16", "params_dtype", "master_dtype", "grad_reduce_in_fp32", "buffer_dtype", "output_dtype",
        "fp8", "fp8_recipe", "backend", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_param",
        "fp8_param_gather", "fp8_exclude", "fp8_head", "fp8_fast_accum", "fp8_emulate",
        "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis", "compile",
    ),
    extra="accelerate",
    library="accelerate",
)  # fmt: skip
def accelerate(policy: Policy, strategy: str | None) -> Settings:
    """The YAML of `accelerate launch --config_file`, and keyword arguments of `Accelerator`.

    Without master weights the mode is `no`, and the model must be loaded in the policy's dtype: accelerate would give
    FSDP parameters FP32 master weights. The arguments have an `fsdp_plugin` (with the policy's reduction dtype) only
    under strategies fsdp1 and fsdp2, a `deepspeed_plugin` only under deepspeed-*.
    """
    mode, reason, unsupported = _mode(policy, strategy), "", _unsupported(policy) if policy.fp8 else None
    if unsupported:
        mode, reason = policy.compute_dtype.short, f"{unsupported}; mpguard converts the model itself"
    settings: dict[str, Any] = {
        "mixed_precision": Setting(mode, reason, equivalent=_is(mode)),
        "fp16": Setting(ABSENT, "the old key, ignored next to mixed_precision", equivalent=lambda found: not found),
        "deepspeed_config.mixed_precision": Setting(ABSENT, "it silently overrides the top-level mixed_precision"),
        "fsdp_config.mixed_precision_policy": Setting(ABSENT, "accelerate reads no such key"),
        "fsdp_config.fsdp_mixed_precision_policy": Setting(ABSENT, "accelerate reads no such key"),
    }
    if unsupported:
        settings |= {f"fp8_config.{key}": Setting(ABSENT, unsupported) for key in ("backend", "fp8_backend")}
    elif policy.fp8:
        fp8 = _fp8(policy, strategy)
        gather = fp8.get("enable_fsdp_float8_all_gather")
        if gather and gather.value:
            why = "accelerate refuses it with torchao's FP8"
            settings["fsdp_config.fsdp_cpu_ram_efficient_loading"] = Setting(
                False, why, equivalent=lambda found: not found
            )
        for key, value in fp8.items():
            settings[f"fp8_config.{key}"] = value
            settings[f"fp8_config.fp8_{key.removeprefix('fp8_')}"] = value if key.startswith("fp8_") else _twin(key)
        if _backend(policy) == "te":
            settings["fp8_config.format"] = _twin("fp8_format")
            for dead in ("amax_history_length", "amax_compute_algorithm"):
                settings[f"fp8_config.{dead}"] = Setting(ABSENT, "`accelerate config` writes it and nothing reads it")
    if policy.compile != "auto":
        backend = (
            Setting("INDUCTOR", equivalent=_is("inductor")) if policy.compile else Setting(ABSENT, equivalent=_is("no"))
        )
        settings |= {
            "dynamo_config.dynamo_backend": backend,
            "dynamo_config.backend": _twin("dynamo_backend"),
            "dynamo_backend": Setting(ABSENT, "the old key, which replaces the whole dynamo_config"),
        }
    return settings


def _mode(policy: Policy, strategy: str | None) -> str:
    """Return the value of `mixed_precision`. Raises `PolicyError` for a policy that accelerate cannot run."""
    if policy.master_dtype is not Dtype.FP32:
        if policy.fp8 and strategy in ("fsdp1", "fsdp2"):
            raise PolicyError(
                f"accelerate: master_dtype is {policy.master_dtype} with fp8 under {strategy}, where accelerate "
                "gives every parameter an FP32 master. Set master_dtype to fp32"
            )
        if not policy.fp8 and not _deepspeed(strategy):
            return "no"
    return "fp8" if policy.fp8 else policy.compute_dtype.short if policy.low_precision else "no"


def _backend(policy: Policy) -> Backend:
    """Return the backend: torchao if the policy allows it, because accelerate's TE path has no current scaling.

    Prototypes of torchao (MXFP8, block scaling) are the other way round.
    """
    return "torchao" if "torchao" in policy.backends and policy.fp8_recipe in FLOAT8_LINEAR else policy.backends[0]


def _fp8(policy: Policy, strategy: str | None) -> dict[str, Any]:
    """Return the settings of `fp8_config`, with the usual spelling of each key: most have an optional prefix."""
    if _backend(policy) == "torchao":
        gather = get("torchao").settings(_one_recipe(policy), strategy)["enable_fsdp_float8_all_gather"].value
        return {
            "backend": Setting("AO", "accelerate's Transformer Engine path has no current scaling"),
            "enable_fsdp_float8_all_gather": Setting(
                gather,
                "" if gather else "on by default; outside FSDP2 the weights it wraps never train",
                # Whether a wish is granted is decided where the number of processes is known.
                equivalent=(lambda found: isinstance(found, bool)) if gather and policy.wishes else None,
                default=True,
            ),
        }
    assert policy.fp8
    settings: dict[str, Any] = {
        "backend": "TE",
        "fp8_format": Setting(policy.fp8.upper(), equivalent=_is(policy.fp8), default="HYBRID"),
        "margin": Setting(policy.fp8_margin, default=0),
    }
    if policy.fp8_recipe == "mxfp8":
        delayed_only = "only delayed scaling has it"
        return settings | {
            "use_mxfp8_block_scaling": True,
            "amax_history_len": Setting(ABSENT, delayed_only, equivalent=lambda found: found == 1024),
            "amax_compute_algo": Setting(ABSENT, delayed_only, equivalent=_is("most_recent")),
        }
    return settings | {
        "use_mxfp8_block_scaling": Setting(ABSENT, equivalent=lambda found: not found),
        "amax_history_len": Setting(policy.fp8_amax_history_len, default=1024),
        "amax_compute_algo": Setting(
            policy.fp8_amax_compute_algo, equivalent=_is(policy.fp8_amax_compute_algo), default="most_recent"
        ),
    }


def _unsupported(policy: Policy) -> str | None:
    """Return why accelerate's own FP8 would be another than the policy's; None if it runs the policy's."""
    if policy.fp16:
        return "under mixed_precision fp8 accelerate computes the rest in bf16"
    if _backend(policy) == "torchao":
        return None if policy.fp8_recipe in FLOAT8_LINEAR else f"accelerate has no {policy.fp8_recipe} on torchao"
    if policy.fp8_recipe not in ("delayed", "mxfp8"):
        return f"accelerate has no {policy.fp8_recipe} on Transformer Engine, only delayed and mxfp8"
    if policy.fp8_recipe == "mxfp8" and policy.fp8 == "hybrid":
        return "accelerate requests MXFP8 only in E4M3"
    return None


def _one_recipe(policy: Policy) -> Policy:
    """Return the policy without `fp8_modules`: accelerate converts all layers with one config."""
    return policy.with_recipe(policy.fp8_recipe)


def _check_te(policy: Policy) -> None:
    """Raise `PolicyError` for a recipe that accelerate's own Transformer Engine path would replace."""
    if reason := _unsupported(policy):
        raise PolicyError(f"accelerate: fp8_recipe is {policy.fp8_recipe}, fp8 is {policy.fp8}: {reason}. {_INSTEAD}")


def _twin(key: str) -> Setting:
    """Return the setting that removes another spelling of a key."""
    return Setting(ABSENT, f"another spelling of `{key}`")


def _is(word: str) -> Callable[[Any], bool]:
    """Return a function that is true for a word in any case, but not for False (an unquoted `no`)."""
    return lambda found: isinstance(found, str) and found.lower() == word


def _deepspeed(strategy: str | None) -> bool:
    """True for a strategy of DeepSpeed."""
    return strategy is not None and strategy.startswith("deepspeed")


@accelerate.adapter
def adapted(settings: dict[str, Setting], config: Mapping[str, Any]) -> dict[str, Setting]:
    """Keep the spellings of the config, and remove `mixed_precision` from one that names a DeepSpeed file."""
    settings = _as_spelled(settings, config)
    if lookup(config, "deepspeed_config.deepspeed_config_file") in (ABSENT, None):
        return settings
    why = "accelerate refuses it with deepspeed_config_file, which sets it"
    return {**settings, "mixed_precision": Setting(ABSENT, why)}


def _as_spelled(settings: dict[str, Setting], config: Mapping[str, Any]) -> dict[str, Setting]:
    """Return settings with the keys of `fp8_config` as the config spells them: with the prefix `fp8_` or without.

    The first setting of a key and its twin has the value, the second removes the other spelling.
    """
    found: dict[str, Setting] = {}
    for key, setting in settings.items():
        section, _, name = key.partition(".")
        other = f"{section}.{name[4:] if name.startswith('fp8_') else f'fp8_{name}'}"
        only_other = lookup(config, key) is ABSENT and lookup(config, other) is not ABSENT
        renamed = section == "fp8_config" and setting.value is not ABSENT and only_other
        found.setdefault(other if renamed else key, setting)
    return found


@accelerate.detector
def is_config(config: Mapping[str, Any]) -> bool:
    """True for a key that only accelerate has; or a section, a mode or `distributed_type`, if most keys are its."""
    if "base_model" in config:  # axolotl
        return False
    if "compute_environment" in config:
        return True
    common = {
        "num_processes", "num_machines", "machine_rank", "use_cpu", "fsdp_config", "dynamo_config", "gpu_ids", "debug",
        "main_process_ip", "main_process_port", "main_training_function", "rdzv_backend", "same_network", "fp8_config",
        "downcast_bf16", "enable_cpu_affinity", "fp16", "dynamo_backend", "tpu_env", "tpu_use_cluster", "commands",
    }  # fmt: skip
    known = common & set(config)
    sections = {"fp8_config", "deepspeed_config", "megatron_lm_config"} & set(config)
    if any(config[key] is None or isinstance(config[key], Mapping) for key in sections):
        own = known | sections | {"mixed_precision", "distributed_type"} & set(config)
        return 2 * len(own) >= len(config) - 2  # a program passes a section of its own to `deepspeed.initialize`
    if "distributed_type" in config:  # training scripts have one in configs of their own, among many other keys
        return 2 * (len(known) + ("mixed_precision" in config)) >= len(config) - 2
    return "mixed_precision" in config and bool(known) and 2 * len(known) >= len(config) - 1


@accelerate.strategy_reader
def strategy_of(config: Mapping[str, Any]) -> str | None:
    """Return the strategy of `distributed_type` and the section that belongs to it."""
    kind = config.get("distributed_type")
    if kind == "FSDP":
        versions = (lookup(config, f"fsdp_config.{key}") for key in ("fsdp_version", "version"))
        version = next((found for found in versions if found is not ABSENT), 1)
        return "fsdp2" if str(version) == "2" else "fsdp1"
    if kind == "DEEPSPEED":
        if lookup(config, "deepspeed_config.deepspeed_config_file") not in (ABSENT, None):
            return None  # that file states the stage
        stage = lookup(config, "deepspeed_config.zero_stage")
        stage = 2 if stage is ABSENT else stage
        return f"deepspeed-zero{stage}" if stage in (1, 2, 3) else "ddp"
    if kind is False:  # NO without quotation marks
        return "single"
    if isinstance(kind, str):
        return "ddp" if kind.startswith("MULTI") else "single" if kind == "NO" else None
    return None


@accelerate.reader
def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy fields that an accelerate YAML sets, without those that accelerate leaves to defaults."""
    mode = str(config.get("mixed_precision", "fp16" if config.get("fp16") else "no")).lower()
    found: dict[str, Any] = {}
    if mode in ("bf16", "fp16"):
        found[mode] = True
    if mode == "fp8":
        found |= {"bf16": True, **_fp8_fields(config)}
    dynamo = _first(config, "dynamo_config", "dynamo_backend", "backend")
    if isinstance(dynamo, str):
        found["compile"] = dynamo.lower() != "no"
    return found


def _fp8_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    backend = _first(config, "fp8_config", "backend", "fp8_backend")
    if backend != "TE":
        gather = _first(config, "fp8_config", "enable_fsdp_float8_all_gather", "fp8_enable_fsdp_float8_all_gather")
        found = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": gather is True}
        return found | ({"backend": "torchao"} if backend == "AO" else {})
    form = str(_or(_first(config, "fp8_config", "fp8_format", "format"), "hybrid")).lower()
    found = {"fp8": form, "backend": "te", "fp8_margin": _or(_first(config, "fp8_config", "margin", "fp8_margin"), 0)}
    if _first(config, "fp8_config", "use_mxfp8_block_scaling", "fp8_use_mxfp8_block_scaling") is True:
        return found | {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
    return found | {
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": _or(_first(config, "fp8_config", "amax_history_len", "fp8_amax_history_len"), 1024),
        "fp8_amax_compute_algo": _or(
            _first(config, "fp8_config", "amax_compute_algo", "fp8_amax_compute_algo"), "most_recent"
        ),
    }


def _first(config: Mapping[str, Any], section: str, *spellings: str) -> Any:
    """Return the value of the first spelling of a key that a section has, or `ABSENT`."""
    values = (lookup(config, f"{section}.{spelling}") for spelling in spellings)
    return next((value for value in values if value is not ABSENT), ABSENT)


def _or(value: Any, default: Any) -> Any:
    return default if value is ABSENT else value


@accelerate.argument_builder
def arguments(policy: Policy, strategy: str | None) -> dict[str, Any]:
    """Return the keyword arguments of `Accelerator` as plain data.

    Raises `PolicyError` for an FP8 recipe that accelerate's own code would replace by another one.
    """
    mode = _mode(policy, strategy)
    if policy.fp8 and policy.fp16:
        raise PolicyError(
            "accelerate: the policy has fp8 with fp16; under mixed_precision fp8 accelerate computes "
            "the rest in bf16. Set bf16=True, or use target `deepspeed` or `megatron`"
        )
    found: dict[str, Any] = {"mixed_precision": mode}
    handlers: dict[str, dict[str, Any]] = {}
    if mode == "fp16" and not _deepspeed(strategy):
        scaling = torch.scaling(policy)
        handlers["GradScalerKwargs"] = scaling
    if policy.fp8 and _backend(policy) == "torchao":
        config = get("torchao").build_arguments(_one_recipe(policy), strategy)
        handlers["AORecipeKwargs"] = {"config": config, "exclude": list(policy.kept_out_of_fp8)}
    elif policy.fp8:
        handlers["TERecipeKwargs"] = _te(policy, strategy)
    if handlers:
        found["kwargs_handlers"] = handlers
    if strategy in ("fsdp1", "fsdp2"):
        found["fsdp_plugin"] = {
            "fsdp_version": int(strategy[-1]),
            "mixed_precision_policy": get(strategy).build_arguments(policy, strategy),
        }
    if strategy is not None and _deepspeed(strategy):
        config = get("deepspeed").build_arguments(policy, strategy)
        found["deepspeed_plugin"] = {"zero_stage": int(strategy[-1]), "config": config}
    if policy.compile != "auto":
        found["dynamo_backend"] = "inductor" if policy.compile else "no"
    return found


def _te(policy: Policy, strategy: str | None) -> dict[str, Any]:
    """Return the arguments of `TERecipeKwargs`, which has fewer fields than Transformer Engine's recipes."""
    _check_te(policy)
    where = f"accelerate: fp8_recipe is {policy.fp8_recipe} on Transformer Engine under {strategy}"
    if strategy == "fsdp2":
        raise PolicyError(f"{where}, where accelerate never enters FP8 autocast: the run would be BF16. {_INSTEAD}")
    if _deepspeed(strategy):
        raise PolicyError(f"{where}, where accelerate ignores TERecipeKwargs. {_INSTEAD}")
    assert policy.fp8
    found: dict[str, Any] = {"fp8_format": policy.fp8.upper(), "margin": policy.fp8_margin}
    if policy.fp8_recipe == "mxfp8":
        return found | {"use_mxfp8_block_scaling": True}
    if policy.fp8_amax_compute_algo == "most_recent":
        raise PolicyError(
            "accelerate: fp8_amax_compute_algo is most_recent, the default of TERecipeKwargs and therefore not "
            f'passed on: Transformer Engine would use its own default, max. Set it to "max". {_INSTEAD}'
        )
    return found | {
        "amax_history_len": policy.fp8_amax_history_len,
        "amax_compute_algo": policy.fp8_amax_compute_algo,
        "use_mxfp8_block_scaling": False,
    }


@accelerate.builder
def keywords(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Accelerator`. Handlers have accelerate's own classes, because it refuses subclasses."""
    found = dict(arguments)
    if "kwargs_handlers" in found:
        found["kwargs_handlers"] = [_handler(name, values) for name, values in found["kwargs_handlers"].items()]
    if "fsdp_plugin" in found:
        found["fsdp_plugin"] = _fsdp_plugin(**found["fsdp_plugin"])
    if "deepspeed_plugin" in found:
        found["deepspeed_plugin"] = _deepspeed_plugin(**found["deepspeed_plugin"])
    return found


def _handler(name: str, values: dict[str, Any]) -> Any:
    from accelerate import utils

    if name == "AORecipeKwargs":
        get("torchao").require()
        # As accelerate's default does: it pads token counts that are not a multiple of 16.
        config = torchao.float8_linear_config(values["config"], pad_inner_dim=True)
        return utils.AORecipeKwargs(config=config, module_filter_func=torchao.Float8Filter(tuple(values["exclude"])))
    if name == "TERecipeKwargs":
        get("te").require()
    return getattr(utils, name)(**values)


def _fsdp_plugin(fsdp_version: int, mixed_precision_policy: dict[str, Any]) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    build = fsdp.mixed_precision if fsdp_version == 1 else fsdp.mixed_precision_policy
    return FullyShardedDataParallelPlugin(
        fsdp_version=fsdp_version, mixed_precision_policy=build(mixed_precision_policy)
    )


def _deepspeed_plugin(zero_stage: int, config: dict[str, Any]) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    get("deepspeed").require()
    built = DeepSpeedPlugin(zero_stage=zero_stage)
    built.deepspeed_config.update(config)
    return built
