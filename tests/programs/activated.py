"""Activate policies without proving them, and print as JSON what the real libraries get: `activated.py CASE`.

accelerate and transformers are called with arguments that cannot take effect on a CPU.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import mpguard
from mpguard.policy import hardware
from mpguard.policy.policy import Policy
from mpguard.runtime import activation
from mpguard.runtime import guard as guards
from mpguard.runtime.plan import Plan

H200 = hardware.Hardware("NVIDIA H200", (9, 0), 1, (13, 0), {"te": "2.20.2", "torchao": "0.18.0"})

#: name -> fields of the policy, and the backend that the script asks for.
COMPILED: dict[str, tuple[dict[str, Any], str | None]] = {
    "torchao": ({"fp8": "hybrid", "backend": "torchao"}, None),
    "torchao, the script's backend": ({"fp8": "hybrid", "backend": "torchao"}, "aot_eager"),
    "delayed": ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "inductor"),
    "te": ({"fp8": "hybrid", "backend": "te"}, "inductor"),
    "switched off": ({"fp8": "hybrid", "backend": "torchao", "compile": False}, None),
    "bf16": ({}, None),
}


def activate(policy: Policy) -> None:
    guards.set_current(None)
    activation.start(Plan(policy, enforce="off", announced=True))


def fsdp() -> list[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    given = [FullyShardedDataParallelPlugin(fsdp_version=each, mixed_precision_policy="fp16") for each in (1, 2)]
    activate(mpguard.recipe("bf16_mixed"))
    seen: dict[str, Any] = {}
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.update(kwargs)
        original(self, *args, **kwargs)

    AcceleratorState.__init__ = init  # type: ignore[method-assign]
    found = []
    for plugin in given:
        AcceleratorState._reset_state(True)
        Accelerator(cpu=True, fsdp_plugin=plugin)
        policy = seen["fsdp_plugin"].mixed_precision_policy
        found.append([str(policy.param_dtype), str(policy.reduce_dtype), seen["mixed_precision"]])
    return found


def training_arguments() -> list[Any]:
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    def mismatches(**fields: bool) -> list[str]:
        config = HfTrainerDeepSpeedConfig({"bf16": {"enabled": True}})
        arguments = TrainingArguments(output_dir="run", use_cpu=True)
        for name, value in fields.items():
            setattr(arguments, name, value)
        config.trainer_config_process(arguments)
        return list(config.mismatches)

    stock = mismatches()
    activate(mpguard.recipe("bf16_mixed"))
    return [stock, mismatches(), mismatches(fp16=True)]


def compiled() -> dict[str, str]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    hardware.detect = lambda: H200
    found = {}
    for name, (fields, backend) in COMPILED.items():
        print(f"-- {name}", file=sys.stderr, flush=True)
        activate(Policy(bf16=True, **fields))
        AcceleratorState._reset_state(True)
        found[name] = Accelerator(cpu=True, dynamo_backend=backend).state.dynamo_plugin.backend.name
    return found


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    print(json.dumps({"fsdp": fsdp, "training_arguments": training_arguments, "compiled": compiled}[sys.argv[1]]()))
