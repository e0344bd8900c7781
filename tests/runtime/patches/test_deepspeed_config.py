"""DeepSpeed's configs under a policy, with the real engine: forms that are kept, consequences that are reported."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

pytest.importorskip("deepspeed", reason="the real library runs here")

from paths import PROGRAMS
from processes import free_port, in_fork, launch_in_forks, mp_yaml, results, run_python, transcript

from mpguard.core.errors import ConfigError
from mpguard.document.schemas.deepspeed import optimizer_class
from mpguard.explain import explain, gather
from mpguard.runtime.patches import deepspeed_config

PROGRAM = PROGRAMS / "deepspeed_config.py"
BF16 = {"bf16": {"enabled": True}}
#: torch's Adam for the biases: DeepSpeed would compile its own, for a minute and a half on two cores.
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}

#: DeepSpeed 0.19.0 takes convolutions in Muon, and fails in its first step with momentum in BF16.
current_muon = pytest.mark.skipif(
    Version(importlib.metadata.version("deepspeed")) < Version("0.19.8"), reason="Muon of DeepSpeed 0.19.8"
)


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def run(
    configs: dict[str, Any] | list[dict[str, Any]], folder: Path, recipe: str | None = "bf16_mixed", **keys: Any
) -> Any:
    """Run the program in one process, under a recipe or stock."""
    configs = configs if isinstance(configs, list) else [configs]
    stage, words = configs[0].get("zero_optimization", {}).get("stage", 0), [json.dumps(each) for each in configs]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ranks |= {"MASTER_PORT": str(free_port()), "TORCHDYNAMO_DISABLE": "1"}  # Muon compiles its kernels for minutes
    if recipe is None:
        return in_fork([PROGRAM, *words], cwd=folder, program=run_python, **ranks)
    section = {"fp8_config": json.dumps({"mpguard_recipe": recipe, **keys})}
    engine = {"distributed_type": "DEEPSPEED", "deepspeed_config": f"{{zero_stage: {stage}}}"}
    path = mp_yaml(folder, use_cpu="false", **engine, **section)
    return in_fork(["--config", path, PROGRAM, *words], cwd=folder, **ranks)


@pytest.mark.parametrize("stage", [2, 3])
def test_torch_autocast_with_fp32_parameters_is_the_policy_and_is_kept(tmp_path: Path, stage: int) -> None:
    config = {**zero(stage), **AUTOCAST}
    stock, made = run(config, tmp_path, None), run(config, tmp_path)
    assert made.returncode == 0 and "proven in force" in made.stderr, transcript(made)
    assert "torch_autocast in bf16 is kept: parameters in fp32" in made.stderr
    assert "parameters     fp32" in made.stderr and "compute        bf16" in made.stderr
    assert results(made)[0]["losses"] == pytest.approx(results(stock)[0]["losses"], abs=2e-3)


@pytest.mark.parametrize(
    "config",
    [
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        {**AUTOCAST, **BF16},
        {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}},
    ],
    ids=["another dtype", "next to a bf16 section", "off"],
)
def test_another_autocast_is_not_the_policy(config: dict[str, Any]) -> None:
    import mpguard

    policy = mpguard.recipe("bf16_mixed")
    made, changes = mpguard.inject({**zero(2), **config}, policy, "deepspeed")
    assert made["bf16"] == {"enabled": True}
    assert ("torch_autocast" in {change.key for change in changes}) is config["torch_autocast"]["enabled"]


def test_a_file_with_torch_autocast_is_kept_under_accelerate_too(tmp_path: Path) -> None:
    """accelerate adds a `bf16` section to it for its mode, which explain does not claim either."""
    content = {**zero(2), "train_micro_batch_size_per_gpu": 8, **AUTOCAST}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    keys: dict[str, Any] = {"deepspeed_config": "{deepspeed_config_file: ds.json}", "mixed_precision": None}
    config = mp_yaml(tmp_path, distributed_type="DEEPSPEED", **keys)
    made = launch_in_forks("--config", config, PROGRAMS / "accelerated.py", cwd=tmp_path)
    assert made.returncode == 0 and "proven in force" in made.stderr, transcript(made)
    assert "torch_autocast in bf16 is kept" in made.stderr and "parameters     fp32" in made.stderr
    found = explain(gather([config, PROGRAMS / "accelerated.py"], environment={}))
    explained = {each.key: each.value for each in found.settings}
    assert (explained["torch_autocast.enabled"], explained["bf16.enabled"]) == (True, False)


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"train_micro_batch_size_per_gpu": "auto"}, "`train_micro_batch_size_per_gpu` is"),
        ({"gradient_clipping": "auto", "steps_per_print": "auto"}, "`gradient_clipping`, `steps_per_print` are"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "`optimizer.params.lr` is"),
    ],
)
def test_an_auto_that_nobody_fills_in_is_reported_before_deepspeed_stops(given: dict[str, Any], keys: str) -> None:
    guard: Any = None  # it is reported before the policy is put into the config
    with pytest.raises(ConfigError, match=f'deepspeed.initialize: {keys} "auto", which the Trainer and accelerate'):
        deepspeed_config.arguments({"config": {**zero(1), **BF16, **given}}, guard)


def test_another_optimizer_class_is_a_line(tmp_path: Path) -> None:
    made = run({**zero(1), **BF16}, tmp_path)
    assert made.returncode == 0 and results(made)[0]["class"] == "BF16_Optimizer", transcript(made)
    line = "DeepSpeed builds BF16_Optimizer in place of DeepSpeedZeroOptimizer, because of data_types.grad_accum_dtype"
    assert line in made.stderr and "added communication_data_type: fp32" in made.stderr, transcript(made)


def test_settings_that_are_replaced_are_reported(tmp_path: Path) -> None:
    bf16 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    made = run({**zero(2), **bf16, "data_types": {"grad_accum_dtype": "bf16"}}, tmp_path)
    assert made.returncode == 0 and "proven in force" in made.stderr, transcript(made)
    assert "bf16.bf16_optimizer_states: true -> (removed) (the policy keeps FP32 master weights)" in made.stderr
    assert "data_types.grad_accum_dtype: bf16 -> fp32" in made.stderr


def test_the_optimizer_class_is_the_one_that_deepspeed_builds(tmp_path: Path) -> None:
    accumulated = {"data_types": {"grad_accum_dtype": "fp32"}}
    configs = [
        {**zero(1), **BF16},
        {**zero(1), **BF16, **accumulated},
        {**zero(2), **BF16, **accumulated},
        {**zero(3), **BF16},
        {**zero(0), **BF16},
        zero(0),
    ]
    made = run(configs, tmp_path, None)
    *built, wrapper, own = [each["class"] for each in results(made)]
    assert built == [optimizer_class(each) for each in configs[:4]], transcript(made)
    assert wrapper in str(optimizer_class(configs[4])) and optimizer_class(configs[5]) is None and own == "AdamW"


def test_muon_under_zero_1_is_proven(tmp_path: Path) -> None:
    made = run({**zero(1), **BF16, **MUON}, tmp_path)
    assert made.returncode == 0 and "proven in force" in made.stderr, transcript(made)
    assert "MuonWithAuxAdam, weights fp32, states fp32" in made.stderr


@current_muon
def test_muon_that_deepspeed_refuses_with_the_policy_names_what_was_changed(tmp_path: Path) -> None:
    made = run({**zero(1), **BF16, **MUON, "conv": True}, tmp_path)
    assert made.returncode != 0, transcript(made)
    assert "deepspeed.initialize refuses the run: BF16 Muon currently supports dense two-dimensional" in made.stderr
    assert "data_types.grad_accum_dtype: (absent) -> fp32" in made.stderr


@current_muon
def test_momentum_in_bf16_is_refused_before_the_first_step_or_accepted(tmp_path: Path) -> None:
    config = {**zero(2), **BF16, **MUON}
    made = run(config, tmp_path)
    assert made.returncode == 1 and not results(made), transcript(made)
    assert "ZeRO-2 holds the momentum of MuonWithAuxAdam in bf16" in made.stderr and "step 1" not in made.stderr
    accepted = run(config, tmp_path, mpguard_allow=[{"states": "bf16"}])
    assert accepted.returncode == 0 and "proven in force" in accepted.stderr, transcript(accepted)
