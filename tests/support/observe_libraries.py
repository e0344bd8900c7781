"""Print the precision that the real libraries give to runs: a program, with a folder per run as arguments.

In each folder: run.sh with the launch line, train.py, and what these name. accelerate's own parser, launcher and
classes, transformers' Trainer and DeepSpeed's config are used in this process, one run after the other. What needs a
GPU is replaced: FSDP's plugin gets the mode by the two lines of `AcceleratorState` that only run there, Transformer
Engine counts as installed, and mpguard's launcher sees `GPU`. Prints one line of JSON per run: the settings, or why it
stopped.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import runpy
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from mpguard.policy import hardware
from mpguard.policy.hardware import Hardware
from mpguard.runtime.launch import launcher

#: The machine for which runs are explained.
GPU = Hardware("NVIDIA H100", (9, 0), 8, (12, 9), {"te": "2.20", "torchao": "0.18", "accelerate": "1.15"})
#: What `deepspeed` and torch.distributed need to start one process.
_ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
_CLEARED = ("ACCELERATE_", "FSDP_", "MPGUARD_", "DEEPSPEED_")


def launch_words(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the words of the launch line of a run.sh."""
    variables: dict[str, str] = {}
    lines = text.replace("\\\n", " ").splitlines()
    for line in lines[:-1]:
        if line.startswith("export "):
            name, _, value = shlex.split(line)[1].partition("=")
            variables[name] = value
    return variables, shlex.split(lines[-1])


def worker_environment(words: list[str]) -> dict[str, str]:
    """Return the variables that the real launcher hands to a worker; this process's for `python train.py`."""
    from accelerate.commands import launch
    from accelerate.utils import launch as launchers

    if words[0] == "python":
        return dict(os.environ)
    flags = words[2:]
    added: Mapping[str, str] = {}
    if words[0] == "mpguard":
        prepared = launcher.prepare(flags, launch.launch_command_parser)
        assert prepared is not None
        flags, added = prepared.argv, prepared.environment
    options = launch.launch_command_parser().parse_args(flags)
    options, defaults, from_config = launch._validate_launch_command(options)
    if options.use_deepspeed and not options.cpu:
        fields = list(defaults.deepspeed_config.keys()) if defaults else []
        fields += ["mixed_precision"] if from_config else []
        options.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return {**launchers.prepare_deepspeed_cmd_env(options)[1], **added}
    if options.use_fsdp and not options.cpu:
        return {**launchers.prepare_multi_gpu_env(options), **added}
    return {**launchers.prepare_simple_launcher_cmd_env(options)[1], **added}


def settings(namespace: Mapping[str, Any], plugin: Any) -> dict[str, Any]:
    """Return the settings that an executed script has."""
    from accelerate import Accelerator
    from transformers import Trainer

    trainer = next((each for each in namespace.values() if isinstance(each, Trainer)), None)
    accelerator: Any = (
        trainer.accelerator
        if trainer is not None
        else next((each for each in namespace.values() if isinstance(each, Accelerator)), None)
    )
    if trainer is not None and getattr(trainer.args, "hf_deepspeed_config", None) is not None:
        trainer.args.hf_deepspeed_config.trainer_config_finalize(trainer.args, trainer.model, 10)
    if accelerator is None:
        return deepspeed_settings(namespace["config"])
    mode = accelerator.state.mixed_precision
    found: dict[str, Any] = {
        "mixed_precision": mode if mode in ("fp16", "bf16", "fp8") else "no",
        "dynamo_config.dynamo_backend": accelerator.state.dynamo_plugin.backend.value.lower(),
    }
    if mode == "fp8":
        found |= fp8_settings(accelerator)
    if mode == "fp16" and accelerator.state.deepspeed_plugin is None:
        from accelerate.utils import GradScalerKwargs

        handler = accelerator.scaler_handler or GradScalerKwargs()
        names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
        found |= {f"grad_scaler.{name}": getattr(handler, name) for name in names}
    if plugin is not None:
        found |= fsdp_settings(plugin, accelerator.state._mixed_precision)
    if accelerator.state.deepspeed_plugin is not None:
        found |= deepspeed_settings(accelerator.state.deepspeed_plugin.deepspeed_config)
    return found


def fp8_settings(accelerator: Any) -> dict[str, Any]:
    backend = str(getattr(accelerator.fp8_backend, "value", accelerator.fp8_backend))
    found: dict[str, Any] = {"fp8_config.backend": backend}
    if backend == "AO":
        config = accelerator.ao_recipe_handler.config
        for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
            found[f"fp8_config.{name}"] = getattr(config, name)
    if backend == "TE":
        handler = accelerator.te_recipe_handler or accelerator.fp8_recipe_handler
        for name, key in (
            ("fp8_format", "format"), ("margin", "margin"), ("amax_history_len", "amax_history_len"),
            ("use_mxfp8_block_scaling", "use_mxfp8_block_scaling"),
            ("use_autocast_during_eval", "use_autocast_during_eval"),
        ):  # fmt: skip
            found[f"fp8_config.{key}"] = getattr(handler, name)
        # What accelerate passes on; the default of Transformer Engine's DelayedScaling is max.
        found["fp8_config.amax_compute_algo"] = handler.to_kwargs().get("amax_compute_algo", "max")
    return found


def fsdp_settings(plugin: Any, mode: str) -> dict[str, Any]:
    if mode != "no":
        plugin.set_mixed_precision(mode)
    policy = plugin.mixed_precision_policy
    names = ("param_dtype", "reduce_dtype", "output_dtype" if plugin.fsdp_version == 2 else "buffer_dtype")
    dtypes = {name: None if policy is None else short(getattr(policy, name)) for name in names}
    return {
        "fsdp_config.fsdp_version": str(plugin.fsdp_version),
        **{f"fsdp.{name}": dtype for name, dtype in dtypes.items()},
    }


def deepspeed_settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what DeepSpeed's own config class makes of a config; under a policy, of the one that mpguard passes."""
    from deepspeed.runtime.config import DeepSpeedConfig

    from mpguard.runtime import guard as guards
    from mpguard.runtime.patches import deepspeed_config

    config = copy.deepcopy(dict(plain))
    # As accelerate does.
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[key] = 1
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = 1.0
    if (guard := guards.current()) is not None:
        config = deepspeed_config.arguments({"config": config}, guard)[0]["config"]
    config = {key: value for key, value in config.items() if value != "auto"}
    parsed = DeepSpeedConfig(config)
    found: dict[str, Any] = {
        "bf16.enabled": parsed.bfloat16_config.enabled,
        "fp16.enabled": parsed.float16_config.enabled,
        "data_types.grad_accum_dtype": parsed.grad_accum_dtype,
    }
    engine = "bf16" if parsed.bfloat16_config.enabled else "fp16" if parsed.float16_config.enabled else "fp32"
    reduced = parsed.communication_data_type
    found["communication_data_type"] = engine if reduced is None else short(reduced)
    if engine == "bf16":
        for name in ("check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states"):
            found[f"bf16.{name}"] = getattr(parsed.bfloat16_config, name)
    if engine == "fp16":
        for name in ("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                     "min_loss_scale"):  # fmt: skip
            found[f"fp16.{name}"] = getattr(parsed.float16_config, name)
    if parsed.torch_autocast_enabled:
        found["torch_autocast.enabled"] = True
        dtype = parsed.torch_autocast_dtype
        found["torch_autocast.dtype"] = None if dtype is None else short(dtype)
    return found


def short(dtype: Any) -> str | None:
    from mpguard.policy.dtype import Dtype

    found = None if dtype is None else Dtype.of(dtype)
    return None if found is None else found.short


def observe(folder: Path) -> dict[str, Any]:
    """Return the settings of one run, or `stopped`."""
    import accelerate.utils.dataclasses
    from accelerate import state

    from mpguard.core.errors import MpguardError
    from mpguard.runtime import activation
    from mpguard.runtime import guard as guards
    from mpguard.runtime.plan import Plan

    variables, words = launch_words((folder / "run.sh").read_text(encoding="utf-8"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_CLEARED)}
    plugins: list[Any] = []
    init = state.AcceleratorState.__init__

    def capture(self: Any, *args: Any, **kwargs: Any) -> None:
        plugins.append(kwargs.get("fsdp_plugin"))
        init(self, *args, **kwargs)

    installed = mock.patch.object(accelerate.utils.dataclasses, "is_transformer_engine_available", lambda: True)
    state.AcceleratorState._reset_state(True)
    guards.set_current(None)
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, {**kept, **_ONE_PROCESS, "MASTER_PORT": _free_port(), **variables}, clear=True),
        mock.patch.object(state.AcceleratorState, "__init__", capture),
        installed,
        mock.patch.object(hardware, "detect", lambda: GPU),
        mock.patch.object(launcher, "has_accelerator", lambda: True),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch.object(sys, "argv", ["train.py", *script_words(words)]),
    ):
        try:
            os.environ.update(worker_environment(words))
            plan = Plan.from_environment()
            if plan is not None:
                activation.start(plan)
            namespace = runpy.run_path("train.py", run_name="__main__")
            return settings(namespace, next((each for each in plugins if each is not None), None))
        except (MpguardError, Exception, SystemExit) as error:
            return {"stopped": f"{type(error).__name__}: {error}"}
        finally:
            state.AcceleratorState._reset_state(True)
            guards.set_current(None)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def script_words(words: list[str]) -> list[str]:
    return words[words.index("train.py") + 1 :]


def main() -> int:
    for name in sys.argv[1:]:
        found = observe(Path(name))
        print(json.dumps({"run": name, **found}), flush=True)
    return 0


if __name__ == "__main__":
    folders = Path(sys.argv[1]).read_text(encoding="utf-8").split() if len(sys.argv) == 2 else sys.argv[1:]
    sys.argv[1:] = folders
    sys.exit(main())
