"""The table of keys that DeepSpeed reads, against the DeepSpeed that is installed, and what the rules report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from limits import seconds

from mpguard.document import parse, validation
from mpguard.document.schemas.deepspeed import (
    CLASSES,
    CONFIG,
    ELSEWHERE,
    RENAMED,
    SECTIONS,
    STRICT,
    VERSION,
    ZERO_NUMBERS,
)

pytest.importorskip("torch", reason="the real library runs here")
pytest.importorskip("deepspeed", reason="the real library runs here")

#: Builds the real config from each line of stdin; prints the keys it looked up, or what it raised.
DRIVER = """
import json, sys

class Recorded(dict):
    read = set()
    def get(self, key, default=None):
        self.read.add(key)
        return dict.get(self, key, default)
    def __getitem__(self, key):
        self.read.add(key)
        return dict.__getitem__(self, key)
    def __contains__(self, key):
        self.read.add(key)
        return dict.__contains__(self, key)
    def keys(self):
        outer = self
        class Keys:
            def __contains__(self, key):
                return key in outer
            def __iter__(self):
                return iter(dict.keys(outer))
        return Keys()
    def __deepcopy__(self, memo):
        return self

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

zero = DeepSpeedZeroConfig.model_fields
result = {"bf16": sorted(DeepSpeedBF16Config.model_fields), "fp16": sorted(DeepSpeedFP16Config.model_fields), "ran": [],
          "zero_optimization": sorted({*zero, *(field.alias for field in zero.values() if field.alias)}),
          "numbers": sorted({name for key, field in zero.items() for name in (key, field.alias)
                             if name and field.annotation is int})}
for line in sys.stdin:
    config = Recorded(json.loads(line))
    for name in ("torch_autocast", "data_types"):
        if name in config:
            config[name] = Recorded(config[name])
            config[name].read = set()
    Recorded.read = set()
    try:
        made = DeepSpeedConfig(config)
    except Exception as error:
        result["ran"].append({"raised": f"{type(error).__name__}: {error}"})
        continue
    result["ran"].append({
        "read": sorted(config.read),
        **{name: sorted(config[name].read) for name in ("torch_autocast", "data_types") if name in config},
        "bf16": made.bfloat16_config.enabled,
        "fp16": made.float16_config.enabled,
        "torch_autocast_on": bool(made.torch_autocast_enabled),
        "stage": made.zero_optimization_stage,
    })
print("RESULT" + json.dumps(result))
"""

#: Trains one step with an engine for each line of stdin, on one process; prints what was raised and the optimizers.
ENGINES = """
import json, os, sys, torch, deepspeed
os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo")
from deepspeed.runtime import config, lr_schedules
import torch.optim.lr_scheduler as schedulers
result = {"ran": [], "optimizer": [*config.DEEPSPEED_OPTIMIZERS], "scheduler": [*lr_schedules.VALID_LR_SCHEDULES],
          "torch optimizer": [name for name in torch.optim.__all__ if name not in ("Optimizer", "lr_scheduler",
                              "swa_utils") and isinstance(getattr(torch.optim, name), type)],
          "torch scheduler": schedulers.__all__}
for line in sys.stdin:
    config = json.loads(line)
    model = torch.nn.Linear(4, 4)
    own = None if "optimizer" in config else torch.optim.AdamW(model.parameters())
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), optimizer=own,
                                          config=config)
        engine.backward(engine(torch.ones(1, 4, dtype=next(model.parameters()).dtype)).float().sum())
        engine.step()
    except Exception as error:
        result["ran"].append(f"{type(error).__name__}: {error}")
    else:
        result["ran"].append(type(engine.optimizer).__name__)
print("RESULT" + json.dumps(result))
"""


def _offloads(stage: int, section: str, device: str, **more: Any) -> dict[str, Any]:
    return {
        "bf16": {"enabled": stage > 0}, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, f"offload_{section}": {"device": device, **more}},
    }  # fmt: skip


#: name -> config; what DeepSpeed raises, or the class of its optimizer; the key that mpguard reports: as refused where
#: DeepSpeed raises, and as without effect where it goes on.
ENGINE_CASES: Mapping[str, tuple[dict[str, Any], str, str]] = {
    "parameters at stage 2": (
        _offloads(2, "param", "cpu"), "DeepSpeedZeroOptimizer", "zero_optimization.offload_param.device",
    ),
    "optimizer at stage 0": (_offloads(0, "optimizer", "cpu"), "AdamW", "zero_optimization.offload_optimizer.device"),
    "NVMe at stage 2": (
        _offloads(2, "optimizer", "nvme"), "DeepSpeedZeroOptimizer", "zero_optimization.offload_optimizer.device",
    ),
    "optimizer at stage 2": (_offloads(2, "optimizer", "cpu"), "DeepSpeedZeroOptimizer", ""),
    "no parameters at stage 2": (_offloads(2, "param", "none"), "DeepSpeedZeroOptimizer", ""),
    "NVMe without a path": (
        _offloads(3, "optimizer", "nvme"), "TypeError", "zero_optimization.offload_optimizer.device",
    ),
    "parameters on NVMe without a path": (
        _offloads(3, "param", "nvme"), '"nvme_path" in DeepSpeed Config cannot be None',
        "zero_optimization.offload_param.device",
    ),
    "parameters at stage 3": (_offloads(3, "param", "cpu"), "DeepSpeedZeroOptimizer_Stage3", ""),
    "a misspelled optimizer": (
        {"optimizer": {"type": "AdamWW", "params": {}}}, "is not a supported DeepSpeed Optimizer", "optimizer.type",
    ),
    "torch's optimizer in lower case": (
        {"optimizer": {"type": "sgd", "params": {}}}, "is not a supported DeepSpeed Optimizer", "optimizer.type",
    ),
    "torch's optimizer": ({"optimizer": {"type": "NAdam", "params": {}}}, "NAdam", ""),
    "a misspelled scheduler": (
        {"optimizer": {"type": "SGD", "params": {}}, "scheduler": {"type": "WarmupDecay", "params": {}}},
        "does not recognize LR scheduler", "scheduler.type",
    ),
    "torch's scheduler": (
        {"optimizer": {"type": "SGD", "params": {}}, "scheduler": {"type": "StepLR", "params": {"step_size": 2}}},
        "SGD", "",
    ),
}  # fmt: skip

#: name -> what is in the config next to the batch size, and what DeepSpeed makes of it.
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any] | str]] = {
    "fp16 and bf16": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "cannot be simultaneously enabled"),
    "auto is off": ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {"fp16": False, "bf16": False}),
    "loss scale in bf16": ({"bf16": {"enabled": True, "loss_scale": 0}}, "Extra inputs are not permitted"),
    "loss scale in bf16 that is off": ({"bf16": {"enabled": False, "hysteresis": 2}}, "Extra inputs are not permitted"),
    "an auto in bf16": ({"bf16": {"enabled": True, "loss_scale": "auto"}}, {"bf16": True}),
    "unknown key of fp16": ({"fp16": {"enabled": True, "opt_level": "O2"}}, "Extra inputs are not permitted"),
    "fp8": ({"fp8": {"enabled": True}}, {"bf16": False, "fp16": False}),
    "bfloat_16": ({"bfloat_16": {"enabled": True}}, {"bf16": False}),
    "bfloat16": ({"bfloat16": {"enabled": True}}, {"bf16": True}),
    "bfloat16 next to bf16": ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, {"bf16": False}),
    "typo of ZeRO": ({"zero_optimisation": {"stage": 3}}, {"stage": 0}),
    "amp": ({"amp": {"enabled": True}}, "Apex AMP integration has been removed"),
    "amp that is off": ({"amp": {"enabled": False}}, "Apex AMP integration has been removed"),
    "bf16 and torch_autocast": (
        {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"bf16": True, "torch_autocast_on": True},
    ),
    "typo in torch_autocast": ({"torch_autocast": {"enable": True, "dtype": "bfloat16"}}, {"torch_autocast_on": False}),
    "auto in torch_autocast is on": (
        {"torch_autocast": {"enabled": "auto", "dtype": "bfloat16"}},
        {"torch_autocast_on": True},
    ),
    "typo in data_types": ({"data_types": {"grad_accum_type": "fp32"}}, {"bf16": False}),
    "fp8 reduction": ({"bf16": {"enabled": True}, "communication_data_type": "fp8"}, "Invalid communication_data_type"),
    "text for a switch": ({"bf16": {"enabled": "yes please"}}, "Input should be a valid boolean"),
    "a word for a switch": ({"bf16": {"enabled": "on"}}, {"bf16": True}),
    "text for a scale": ({"fp16": {"enabled": True, "loss_scale": "dynamic"}}, "must be a number"),
    "a number as text": ({"fp16": {"enabled": True, "hysteresis": "2"}}, {"fp16": True}),
    "half a step": ({"fp16": {"enabled": True, "loss_scale_window": 1.5}}, "Input should be a valid integer"),
    "a switch for a section": ({"bf16": True}, "must be a mapping, not bool"),
    "ZeRO 5": ({"zero_optimization": {"stage": 5}}, "Input should be 0, 1, 2, 3"),
    "a key of ZeRO": ({"zero_optimization": {"stage": 1, "overlap_com": True}}, "Extra inputs are not permitted"),
    "a long name of the reduction": ({"communication_data_type": "float32"}, "Invalid communication_data_type"),
    "the reduction in capitals": ({"communication_data_type": "FP32"}, {"bf16": False}),
    "no dtype of autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat61"}}, "is not a valid DtypeEnum"),
    "a long dtype of autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, {"torch_autocast_on": True},
    ),
    "text for the clipping": ({"gradient_clipping": "one"}, {"bf16": False}),
    "text for a bucket": ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}, "valid integer"),
    "a float for a bucket": ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, {"stage": 2}),
    "text for a switch of ZeRO": ({"zero_optimization": {"stage": 2, "overlap_comm": "maybe"}}, "valid boolean"),
    "a number for ZeRO": ({"zero_optimization": 2}, "must be a mapping, not int"),
    "an unknown device": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}}, "Input should be 'none', 'cpu'",
    ),
    "text for steps": ({"gradient_accumulation_steps": "2"}, "TypeError"),
    "states in BF16 without masters in BF16": (
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "zero_optimization": {"stage": 1}},
        "requires bf16_master_weights_and_grads",
    ),
    "masters in BF16 without ZeRO": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "only supported with ZeRO Stage 1, 2, or 3",
    ),
    "masters in FP16 without ZeRO": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "zero_optimization": {"stage": 0}},
        "only supported with ZeRO Stage 1, 2, or 3",
    ),
    "states in BF16": (
        {
            "bf16": {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True},
            "zero_optimization": {"stage": 2},
        },
        {"bf16": True},
    ),
    "power of 64": ({"fp16": {"enabled": True, "initial_scale_power": 64}}, {"fp16": True}),
}  # fmt: skip


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 1}
    whole = {
        **base, "fp16": {"enabled": False}, "optimizer": {"type": "Adam", "params": {}},
        "scheduler": {"type": "x", "params": {}}, "torch_autocast": {"enabled": False, "dtype": "bfloat16",
        "lower_precision_safe_modules": []}, "data_types": {}, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    lines = [whole, *({**base, **config} for config, _ in CASES.values())]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input="\n".join(map(json.dumps, lines)), capture_output=True, text=True, timeout=seconds(300),
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")] or [done.stderr]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return result


def test_the_table_is_of_the_installed_version() -> None:
    assert importlib.metadata.version("deepspeed") == VERSION


def test_keys_are_what_the_config_looks_up(real: dict[str, Any]) -> None:
    assert set(real["ran"][0]["read"]) == CONFIG
    assert not CONFIG & ELSEWHERE


@pytest.mark.parametrize("section", ["torch_autocast", "data_types"])
def test_keys_of_loose_sections_are_what_is_looked_up(real: dict[str, Any], section: str) -> None:
    assert set(real["ran"][0][section]) == SECTIONS[section]


@pytest.mark.parametrize("section", ["bf16", "fp16", "zero_optimization"])
def test_keys_of_strict_sections_are_their_fields(real: dict[str, Any], section: str) -> None:
    assert set(real[section]) == SECTIONS[section]
    assert section in STRICT


def test_numbers_of_zero_are_its_fields_with_whole_numbers(real: dict[str, Any]) -> None:
    assert set(real["numbers"]) == ZERO_NUMBERS


def test_the_tables_agree() -> None:
    assert set(SECTIONS) <= CONFIG
    assert set(RENAMED.values()) <= set(SECTIONS) and not set(RENAMED) & CONFIG


@pytest.mark.parametrize("name", CASES)
def test_behaviour(real: dict[str, Any], name: str) -> None:
    """The statements of the pages of MPG821 to MPG828."""
    seen = real["ran"][1 + list(CASES).index(name)]
    expected = CASES[name][1]
    if isinstance(expected, str):
        assert expected in seen["raised"]
    else:
        assert {key: seen.get(key) for key in expected} == expected
    if name == "text for the clipping":  # which the engine compares with 0, later
        seen = {"raised": "TypeError"}
    if name not in ("fp16 and bf16", "amp", "amp that is off"):  # which are two keys, and a removed section
        document = parse(json.dumps({"train_micro_batch_size_per_gpu": 1, **CASES[name][0]}), "ds.json")
        assert bool(list(validation.deepspeed_problems(document))) == ("raised" in seen)


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    lines = [json.dumps({"train_micro_batch_size_per_gpu": 1, **config}) for config, _, _ in ENGINE_CASES.values()]
    done = subprocess.run(
        [sys.executable, "-c", ENGINES], input="\n".join(lines), capture_output=True, text=True, timeout=seconds(300),
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")] or [done.stderr]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return result


@pytest.mark.parametrize("name", ENGINE_CASES)
def test_offloading_and_classes_do_what_the_engine_does(engines: dict[str, Any], name: str) -> None:
    config, expected, key = ENGINE_CASES[name]
    seen = engines["ran"][list(ENGINE_CASES).index(name)]
    assert expected in seen
    document = parse(json.dumps({"train_micro_batch_size_per_gpu": 1, **config}), "ds.json")
    stops = "Error" in seen
    assert [each.key for each in validation.deepspeed_problems(document)] == [key] * stops
    assert [each.key for each in validation.without_effect(document)] == [key] * (bool(key) and not stops)


def test_the_classes_are_those_of_deepspeed_and_torch(engines: dict[str, Any]) -> None:
    folded, optimizers = CLASSES["optimizer"]
    assert {each.lower() for each in folded} == set(engines["optimizer"])
    assert set(engines["torch optimizer"]) <= optimizers
    assert {*engines["scheduler"], *engines["torch scheduler"]} <= CLASSES["scheduler"][1]
