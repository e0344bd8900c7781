"""What `policy.to(target)` builds, with the real libraries on the CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import torch
import yaml
from limits import seconds
from paths import PROGRAMS
from processes import on_ranks

import mpguard
from mpguard.core.errors import MissingExtra, PolicyError
from mpguard.policy.policy import Policy
from mpguard.targets.inject import differences, inject
from mpguard.targets.plugin import STRATEGIES, get
from mpguard.targets.settings import ABSENT

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="the real library runs here")

BRIDGE = (
    "bf16_mixed", "fp16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "fp16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed", "fp16_with_fp8_current_scaling_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed", "nanov2_bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed", "fp16_with_fp8_subchannel_scaling_mixed", "bf16_with_mxfp8_mixed",
    "fp16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed",
)  # fmt: skip


def to(policy: Policy | str, target: str, strategy: str | None = None) -> Any:
    """`policy.to` without the warning about fields that are not carried; test_plugin_laws.py tests that warning."""
    policy = mpguard.recipe(policy) if isinstance(policy, str) else policy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpguard.NotCarried)
        return policy.to(target, strategy)


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "product"),
    [("bf16_mixed", torch.bfloat16), ("fp16_mixed", torch.float16), ("fp32", torch.float32), ("tf32", torch.float32)],
)
def test_autocast_lowers_products_to_the_policys_dtype(name: str, product: Any) -> None:
    model = torch.nn.Linear(4, 4)
    with torch.autocast(**to(name, "torch").autocast("cpu")):
        assert model(torch.ones(2, 4)).dtype is product


def test_without_master_weights_the_model_has_the_dtype_and_autocast_is_off() -> None:
    precision = to("bf16_full", "torch")
    model = torch.nn.Linear(4, 4).to(precision.parameters)
    with torch.autocast(**precision.autocast("cpu")):
        assert not torch.is_autocast_enabled("cpu")
        assert model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16


def overflowing(scaler: Any, factor: float) -> None:
    """One step whose gradients are `factor` times the scale."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def test_scaler_follows_the_policys_loss_scale() -> None:
    policy = mpguard.Policy(fp16=True, initial_loss_scale=2.0**10, loss_scale_window=2, grad_reduce_in_fp32=True)
    scaler = to(policy, "torch").scaler("cpu")
    overflowing(scaler, 1.0)
    assert scaler.get_scale() == 2.0**10
    overflowing(scaler, 1.0)
    assert scaler.get_scale() == 2.0**11, "doubled after loss_scale_window steps"
    overflowing(scaler, float("inf"))
    assert scaler.get_scale() == 2.0**11, "hysteresis is 2"
    overflowing(scaler, float("inf"))
    assert scaler.get_scale() == 2.0**10, "halved by the second overflow"


def test_a_fixed_loss_scale_stays_after_overflows_and_many_steps() -> None:
    scaler = to(Policy(fp16=True, loss_scale=1000.0), "torch").scaler("cpu")
    scaler.set_growth_interval(1)
    for factor in (1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0):
        overflowing(scaler, factor)
        assert scaler.get_scale() == 1000.0


def test_without_fp16_the_scaler_passes_everything_through() -> None:
    scaler = to("bf16_mixed", "torch").scaler("cpu")
    assert not scaler.is_enabled()
    assert scaler.scale(torch.tensor(3.0)).item() == 3.0


def test_under_fsdp1_the_scaler_is_fsdps() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    assert not to("fp16_mixed", "torch").sharded
    precision = to("fp16_mixed", "torch", "fsdp1")
    assert precision.sharded
    assert isinstance(dataclasses.replace(precision, scaling={"enabled": False}).scaler("cpu"), ShardedGradScaler)


def test_tf32_is_set_to_the_policys_value() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        for name, on in (("tf32", True), ("bf16_mixed", True), ("fp32", False), ("bf16_mixed", False)):
            to(name, "torch").set_tf32()  # bf16_mixed leaves it alone
            assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (on, on)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# --- FSDP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BRIDGE)
def test_fsdp_objects_compute_and_reduce_in_the_policys_dtypes(name: str) -> None:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    low = torch.bfloat16 if "bf16" in name else torch.float16
    reduce = torch.float32 if "bf16" in name else torch.float16
    assert to(name, "fsdp1") == MixedPrecision(param_dtype=low, reduce_dtype=reduce)
    assert to(name, "fsdp2") == MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce)


def test_fsdp_buffers_and_outputs() -> None:
    policy = Policy(bf16=True, buffer_dtype="fp32", output_dtype="fp32")
    assert to(policy, "fsdp1").buffer_dtype is torch.float32
    assert to(policy, "fsdp2").output_dtype is torch.float32
    with pytest.warns(mpguard.NotCarried, match="fsdp1: has no setting for `output_dtype=fp32`"):
        policy.to("fsdp1")
    with pytest.warns(mpguard.NotCarried, match="fsdp2: has no setting for `buffer_dtype=fp32`"):
        policy.to("fsdp2")


# --- torchao --------------------------------------------------------------------------------------


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_recipes_are_torchaos_own(recipe: Any) -> None:
    from torchao.float8 import Float8LinearConfig

    policy = Policy(bf16=True, fp8="hybrid" if recipe == "tensorwise" else "e4m3", fp8_recipe=recipe)
    assert to(policy, "torchao") == Float8LinearConfig.from_recipe_name(recipe)
    emulated = to(policy.replace(fp8_emulate=True), "torchao")
    assert emulated == dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)


@needs_torchao
def test_torchao_e4m3_gradients_and_fast_accumulation() -> None:
    config = to(Policy(bf16=True, fp8="e4m3", fp8_fast_accum=True), "torchao")
    assert config.cast_config_grad_output.target_dtype is torch.float8_e4m3fn
    assert config.cast_config_grad_output_for_grad_weight.target_dtype is torch.float8_e4m3fn
    assert config.gemm_config_grad_input.use_fast_accum and config.gemm_config_grad_weight.use_fast_accum
    default = to(Policy(bf16=True, fp8="hybrid"), "torchao")
    assert default.cast_config_grad_output.target_dtype is torch.float8_e5m2
    assert not default.gemm_config_grad_input.use_fast_accum


@needs_torchao
def test_float8_all_gather_is_set_only_under_fsdp2() -> None:
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed")
    asked = {s: to(policy, "torchao", s).enable_fsdp_float8_all_gather for s in (None, *mpguard.targets.STRATEGIES)}
    assert [strategy for strategy, on in asked.items() if on] == ["fsdp2"]
    rowwise = Policy(bf16=True, fp8="e4m3", fp8_recipe="rowwise", fp8_param_gather=True)
    assert not to(rowwise, "torchao", "fsdp2").enable_fsdp_float8_all_gather


@needs_torchao
@pytest.mark.parametrize(
    "name", ["bf16_mixed", "fp32", "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_mxfp8_mixed",
             "bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_nvfp4_mixed"],
)  # fmt: skip
def test_torchao_refuses_what_it_does_not_have(name: str) -> None:
    with pytest.raises(PolicyError, match=r"^torchao: "):
        mpguard.recipe(name).to("torchao")


@needs_torchao
def test_an_emulated_model_trains_in_float8_where_the_policy_wants_it() -> None:
    from mpguard_plugins.torchao import Float8Filter
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    model = torch.nn.ModuleDict(
        {"proj": torch.nn.Linear(32, 32), "odd": torch.nn.Linear(32, 17), "lm_head": torch.nn.Linear(32, 64)}
    ).to(torch.bfloat16)
    policy = Policy(bf16=True, fp8="hybrid", fp8_emulate=True, backend="torchao")
    convert_to_float8_training(model, config=to(policy, "torchao"), module_filter_fn=Float8Filter.of(policy))
    assert {name: type(module) is Float8Linear for name, module in model.items()} == {
        "proj": True, "odd": False, "lm_head": False,
    }  # fmt: skip
    out = model["lm_head"](model["proj"](torch.randn(16, 32, dtype=torch.bfloat16)))
    out.float().pow(2).mean().backward()
    assert model["proj"].weight.grad.isfinite().all() and model["proj"].weight.grad.abs().sum() > 0
    assert Float8Filter.of(policy.replace(fp8_head=True))(torch.nn.Linear(32, 64), "lm_head")


# --- accelerate -----------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    """accelerate keeps its state in the class and in the environment."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()  # another test may have left a state
    before = dict(os.environ)
    yield
    reset()
    os.environ.clear()
    os.environ.update(before)


ON_ACCELERATE = [
    (name, strategy)
    for name in ("bf16_mixed", "bf16_full", "fp32", "fp16_mixed", "bf16_with_fp8_current_scaling_mixed",
                 "bf16_with_fp8_rowwise_mixed", "bf16_with_nvfp4_mixed")
    for strategy in (None, *STRATEGIES)
]  # fmt: skip


@pytest.mark.parametrize(("name", "strategy"), ON_ACCELERATE)
@pytest.mark.usefixtures("fresh")
def test_accelerator_takes_the_keywords(name: str, strategy: str | None) -> None:
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs, DeepSpeedPlugin, FullyShardedDataParallelPlugin, GradScalerKwargs

    policy = mpguard.recipe(name)
    if policy.fp8:
        pytest.importorskip("torchao", reason="accelerate's recipe has its config")
    keywords = to(policy, "accelerate", strategy)
    accelerator = Accelerator(cpu=True, **keywords)
    assert accelerator.mixed_precision == keywords["mixed_precision"]
    handlers = [type(handler) for handler in keywords.get("kwargs_handlers", [])]
    deepspeed = strategy is not None and strategy.startswith("deepspeed")
    assert handlers == [AORecipeKwargs] * bool(policy.fp8) + [GradScalerKwargs] * (policy.fp16 and not deepspeed)
    if strategy in ("fsdp1", "fsdp2"):
        plugin = keywords["fsdp_plugin"]
        assert isinstance(plugin, FullyShardedDataParallelPlugin) and plugin.fsdp_version == int(strategy[-1])
        assert plugin.mixed_precision_policy == to(policy, strategy)
    elif deepspeed:
        assert isinstance(keywords["deepspeed_plugin"], DeepSpeedPlugin)
        assert keywords["deepspeed_plugin"].deepspeed_config["zero_optimization"]["stage"] == int(strategy[-1])
        assert differences(keywords["deepspeed_plugin"].deepspeed_config, policy, "deepspeed", strategy) == []
    else:
        assert not {"fsdp_plugin", "deepspeed_plugin"} & set(keywords)


@pytest.mark.usefixtures("fresh")
def test_accelerates_own_deepspeed_step_leaves_the_policy_in_force() -> None:
    """`set_mixed_precision` and the filling of "auto" come after our plugin is made."""
    keywords = to("bf16_mixed", "accelerate", "deepspeed-zero2")
    plugin = keywords["deepspeed_plugin"]
    plugin.set_mixed_precision(keywords["mixed_precision"])
    assert differences(plugin.deepspeed_config, mpguard.recipe("bf16_mixed"), "deepspeed", "deepspeed-zero2") == []


@needs_torchao
@pytest.mark.usefixtures("fresh")
def test_float8_of_accelerate_is_the_policys() -> None:
    policy = Policy(bf16=True, fp8="hybrid", fp8_emulate=True)
    (handler,) = to(policy, "accelerate")["kwargs_handlers"]
    assert handler.config == dataclasses.replace(to(policy, "torchao"), pad_inner_dim=True)
    linear = torch.nn.Linear(32, 32)
    assert handler.module_filter_func(linear, "model.layers.0.mlp.up_proj")
    assert not handler.module_filter_func(linear, "model.lm_head")
    assert not handler.module_filter_func(linear, "model.layers.0.mlp.gate")
    assert handler.module_filter_func(linear, "model.layers.0.mlp.gate_proj")


@pytest.mark.usefixtures("fresh")
def test_grad_scaler_of_accelerate_is_the_policys() -> None:
    (handler,) = to(Policy(fp16=True, initial_loss_scale=4096.0, loss_scale_window=50), "accelerate")["kwargs_handlers"]
    assert (handler.init_scale, handler.growth_interval, handler.enabled) == (4096.0, 50, True)
    (handler,) = to(Policy(fp16=True, loss_scale=512.0), "accelerate")["kwargs_handlers"]
    assert torch.amp.GradScaler("cpu", **handler.to_kwargs()).get_scale() == 512.0


@pytest.mark.parametrize(("compiled", "backend"), [(True, "INDUCTOR"), (False, "NO")])
def test_compile_reaches_accelerate_and_the_trainer(
    compiled: bool, backend: str, arguments_of: Any, tmp_path: Path
) -> None:
    from accelerate import Accelerator

    policy = Policy(bf16=True, compile=compiled)
    config, _ = inject({**BASE, "dynamo_backend": "EAGER"}, policy, "accelerate")
    assert "dynamo_backend" not in config
    assert (launched(config, tmp_path).dynamo_backend or "no").upper() == backend
    assert arguments_of(**to(policy, "transformers")).torch_compile is compiled
    accelerator = Accelerator(cpu=True, **to(policy, "accelerate"))
    assert accelerator.state.dynamo_plugin.backend.value == backend


def test_transformer_engine_handlers_need_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed")
    assert get("accelerate").build_arguments(policy)["kwargs_handlers"] == {
        "TERecipeKwargs": {
            "fp8_format": "HYBRID", "margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max",
            "use_mxfp8_block_scaling": False,
        }
    }  # fmt: skip
    monkeypatch.setattr(get("te"), "module", "a_library_that_nobody_has")
    with pytest.raises(MissingExtra, match=r"mpguard\[te\]"):
        to(policy, "accelerate")


@pytest.mark.parametrize(
    ("policy", "strategy", "reason"),
    [
        (Policy(bf16=True, fp8="hybrid", fp8_recipe="blockwise"), None, "no blockwise on Transformer Engine"),
        (Policy(bf16=True, fp8="hybrid", backend="te"), None, "no tensorwise on Transformer Engine"),
        (Policy(bf16=True, fp8="hybrid", fp8_recipe="mxfp8"), None, "MXFP8 only in E4M3"),
        (Policy(fp16=True, fp8="hybrid"), None, "the rest in bf16"),
        (Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed"), None, "most_recent"),
        (mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed"), "fsdp2", "the run would be BF16"),
        (mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed"), "deepspeed-zero2", "ignores TERecipeKwargs"),
        (Policy(bf16=True, fp8="hybrid", master_dtype="bf16"), "fsdp2", "FP32 master"),
    ],
)
def test_what_accelerate_would_run_as_something_else_is_refused(
    policy: Policy, strategy: str | None, reason: str
) -> None:
    with pytest.raises(PolicyError, match=reason):
        policy.to("accelerate", strategy)


@pytest.mark.parametrize(
    "policy",
    [Policy(bf16=True, fp8="e4m3", fp8_recipe="blockwise"), Policy(bf16=True, fp8="hybrid", backend="te")],
)
def test_unsupported_fp8_configures_accelerate_for_bf16(policy: Policy) -> None:
    """mpguard converts there: accelerate must not do it too, with another recipe."""
    settings = get("accelerate").settings(policy)
    assert settings["mixed_precision"].value == "bf16" and "mpguard converts" in settings["mixed_precision"].reason
    assert settings["fp8_config.backend"].value is ABSENT


def test_float8_all_gather_goes_without_accelerates_efficient_loading() -> None:
    policy = Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_param_gather=True)
    key = "fsdp_config.fsdp_cpu_ram_efficient_loading"
    assert get("accelerate").settings(policy, "fsdp2")[key].value is False
    assert key not in get("accelerate").settings(policy, "fsdp1")
    assert key not in get("accelerate").settings(policy.replace(fp8_param_gather=False), "fsdp2")


# --- accelerate's YAML ----------------------------------------------------------------------------


def launched(config: dict[str, Any], folder: Path) -> Any:
    """What the real launcher makes of a config file: its arguments after the file is merged in."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = folder / "mp.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    return _validate_launch_command(arguments)[0]


BASE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "num_machines": 1}


@pytest.mark.parametrize(
    ("name", "mode"),
    [("bf16_mixed", "bf16"), ("fp16_mixed", "fp16"), ("fp32", "no"), ("bf16_full", "no"), ("tf32", "no")],
)
@pytest.mark.usefixtures("fresh")
def test_the_real_launcher_reads_the_mode(name: str, mode: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpguard.NotCarried)
        config, _ = inject({**BASE, "mixed_precision": False}, mpguard.recipe(name), "accelerate")
    assert launched(config, tmp_path).mixed_precision == mode


@pytest.mark.usefixtures("fresh")
def test_a_key_that_beats_the_mode_is_taken_out(tmp_path: Path) -> None:
    config = {**BASE, "mixed_precision": "bf16", "deepspeed_config": {"mixed_precision": "fp16", "zero_stage": 2}}
    assert launched(config, tmp_path).mixed_precision == "fp16", "accelerate no longer does that: the key may stay"
    fixed, changes = inject(config, mpguard.recipe("bf16_mixed"), "accelerate")
    assert [(change.key, change.old, change.new) for change in changes] == [
        ("deepspeed_config.mixed_precision", "fp16", ABSENT)
    ]
    assert launched(fixed, tmp_path).mixed_precision == "bf16"
    assert fixed["deepspeed_config"] == {"zero_stage": 2}


@pytest.mark.usefixtures("fresh")
def test_the_real_launcher_hands_on_fp8(tmp_path: Path) -> None:
    from accelerate.utils.launch import setup_fp8_env

    policy = Policy(bf16=True, fp8="e4m3", fp8_recipe="delayed", fp8_margin=2, fp8_amax_history_len=16)
    # what `accelerate config` writes: keys that nothing reads
    written = {**BASE, "fp8_config": {"backend": "TE", "amax_history_length": 512, "amax_compute_algorithm": "max"}}
    config, _ = inject(written, policy, "accelerate")
    environment = setup_fp8_env(launched(config, tmp_path), {})
    assert {name: environment[f"ACCELERATE_FP8_{name}"] for name in ("BACKEND", "FORMAT", "MARGIN")} == {
        "BACKEND": "TE", "FORMAT": "E4M3", "MARGIN": "2",
    }  # fmt: skip
    assert environment["ACCELERATE_FP8_AMAX_HISTORY_LEN"] == "16"
    assert environment["ACCELERATE_FP8_AMAX_COMPUTE_ALGO"] == "most_recent"
    assert "ACCELERATE_FP8_AMAX_HISTORY_LENGTH" not in environment


def test_spellings_that_accelerate_reads_alike_are_no_difference() -> None:
    policy = mpguard.recipe("bf16_mixed")
    assert differences({"mixed_precision": "BF16"}, policy, "accelerate") == []
    (change,) = differences({"mixed_precision": False}, mpguard.recipe("fp32"), "accelerate")
    assert str(change) == "mixed_precision: false -> no", "an unquoted `no` is a boolean, which accelerate cannot read"


def test_with_a_deepspeed_file_the_yaml_has_no_mode() -> None:
    config = {**BASE, "distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
              "deepspeed_config": {"deepspeed_config_file": "ds.json"}}  # fmt: skip
    (change,) = differences(config, mpguard.recipe("bf16_mixed"), "accelerate")
    assert (change.key, change.new) == ("mixed_precision", ABSENT)


@pytest.mark.parametrize(
    ("target", "config", "strategy"),
    [
        ("accelerate", {"distributed_type": "NO"}, "single"),
        ("accelerate", {"distributed_type": "MULTI_GPU"}, "ddp"),
        ("accelerate", {"distributed_type": "FSDP"}, "fsdp1"),
        ("accelerate", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "fsdp2"),
        ("accelerate", {"distributed_type": "DEEPSPEED"}, "deepspeed-zero2"),
        ("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}, "deepspeed-zero3"),
        ("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "x"}}, None),
        ("accelerate", {"distributed_type": "TPU"}, None),
        ("deepspeed", {"zero_optimization": {"stage": 1}}, "deepspeed-zero1"),
        ("deepspeed", {"zero_optimization": {"stage": "auto"}}, None),
        ("deepspeed", {}, None),
        ("axolotl", {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, "fsdp2"),
        ("axolotl", {"fsdp_config": {}}, None),
        ("te", {}, None),
    ],
)
def test_a_config_states_its_strategy(target: str, config: dict[str, Any], strategy: str | None) -> None:
    assert get(target).read_strategy(config) == strategy


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"compute_environment": "LOCAL_MACHINE"}, "accelerate"),
        ({"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, "accelerate"),
        ({"mixed_precision": "bf16", "num_processes": 2}, "accelerate"),
        ({"distributed_type": "FSDP", "mixed_precision": "bf16"}, "accelerate"),
        ({"distributed_type": "ddp", "lr": 1e-4, "batch_size": 8, "dtype": "bfloat16"}, None),
        ({"mixed_precision": "bf16", "learning_rate": 1e-4}, None),
        ({"zero_optimization": {"stage": 2}}, "deepspeed"),
        ({"bf16": {"enabled": True}}, "deepspeed"),
        ({"train_batch_size": 8}, "deepspeed"),
        ({"bf16": True, "learning_rate": 1e-4}, None),
        ({"base_model": "x", "micro_batch_size": 1, "bf16": "auto", "fsdp_config": {"a": 1}}, "axolotl"),
        ({"base_model": "x"}, None),
        ({"name": "ci", "on": ["push"]}, None),
        ({}, None),
    ],
)
def test_config_files_are_recognised_by_their_content(config: dict[str, Any], kind: str | None) -> None:
    found = [name for name, plugin in mpguard.targets.plugins().items() if plugin.detect(config)]
    assert found == ([kind] if kind else [])


# --- DeepSpeed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BRIDGE, "fp32", "tf32", "bf16_full"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_accepts_the_config(name: str, stage: int) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    policy = mpguard.recipe(name)
    if name == "bf16_full" and stage == 0:
        with pytest.raises(PolicyError, match="only under ZeRO"):
            policy.to("deepspeed", "ddp")
        return
    config = {
        **to(name, "deepspeed", f"deepspeed-zero{stage}" if stage else "ddp"),
        "train_micro_batch_size_per_gpu": 1,
    }
    config["zero_optimization"] = {"stage": stage}
    read = DeepSpeedConfig(config)
    assert (read.bfloat16_config.enabled, read.float16_config.enabled) == (policy.bf16, policy.fp16)
    if policy.fp16:
        assert read.float16_config.loss_scale == 0
        assert read.float16_config.initial_dynamic_scale() == 2**32
        assert (read.float16_config.hysteresis, read.float16_config.min_loss_scale) == (2, 1)
    if policy.bf16:
        assert read.communication_data_type is torch.float32


def test_deepspeed_fixed_loss_scale() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = {**to(Policy(fp16=True, loss_scale=300.0), "deepspeed"), "train_micro_batch_size_per_gpu": 1}
    assert DeepSpeedConfig(config).float16_config.loss_scale == 300.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"initial_loss_scale": 1000.0}, "requires a power of two. Set it to 512 or 1024"),
        ({"initial_loss_scale": 0.5}, "Set it to 1 or 2"),
        ({"min_loss_scale": 0.25}, "must be a whole number. Set it to 1"),
        ({"params_dtype": "fp32", "hysteresis": 4}, "GradScaler without settings"),
    ],
)
def test_loss_scales_that_deepspeed_cannot_hold_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        Policy(fp16=True, **fields).to("deepspeed")


def test_deepspeed_auto_and_dead_sections_are_resolved() -> None:
    config = {
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}, "fp8": {"enabled": True},
        "bfloat16": {"enabled": False}, "torch_autocast": {"enabled": "auto"}, "zero_optimization": {"stage": 2},
    }  # fmt: skip
    fixed, changes = inject(config, mpguard.recipe("bf16_mixed"), "deepspeed")
    assert fixed == {
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "zero_optimization": {"stage": 2},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    assert {change.key for change in changes if change.new is ABSENT} == {"fp8", "bfloat16", "torch_autocast"}


ENGINES: list[tuple[Policy, int, dict[str, list[str]]]] = [
    (Policy(bf16=True), stage, {"parameters": ["bfloat16"], "masters": ["float32"], "reduced": ["float32"]})
    for stage in (0, 1, 2, 3)
]
ENGINES += [
    (Policy(bf16=True, grad_reduce_in_fp32=False), stage, {"masters": ["float32"], "reduced": ["bfloat16"]})
    for stage in (1, 3)
]
ENGINES += [
    (
        Policy(bf16=True, master_dtype="bf16"),
        stage,
        {"masters": ["bfloat16"], "states": ["bfloat16"], "reduced": ["float32"]},
    )
    for stage in (2, 3)
]
ENGINES += [
    (Policy(bf16=True, params_dtype="fp32"), stage, {"parameters": ["float32"], "reduced": ["float32"]})
    for stage in (2, 3)
]


def test_deepspeed_engines_compute_and_reduce_in_the_policys_dtypes(tmp_path: Path) -> None:
    """Two real processes; the reduction dtype is that of the tensors in the collectives."""
    lines = [f"{policy} {stage}" for policy, stage, _ in ENGINES]
    done = on_ranks(PROGRAMS / "deepspeed_reduction.py", *lines, cwd=tmp_path, timeout=seconds(240))
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == len(ENGINES)
    for (policy, stage, expected), result in zip(ENGINES, results, strict=True):
        assert result | expected == result, (policy, stage)


# --- transformers ---------------------------------------------------------------------------------


@pytest.fixture
def arguments_of(fresh: None, tmp_path: Path) -> Any:
    from transformers import TrainingArguments

    return lambda **more: TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **more)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("bf16_mixed", "bf16"),
        ("fp16_mixed", "fp16"),
        ("fp32", "no"),
        ("bf16_full", "no"),
        ("bf16_with_nvfp4_mixed", "bf16"),
    ],
)
def test_training_arguments_take_the_keywords(name: str, mode: str, arguments_of: Any) -> None:
    assert arguments_of(**to(name, "transformers")).mixed_precision == mode


def test_fp8_reaches_the_trainer_only_past_training_arguments(
    arguments_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PolicyError, match="has FP8, which TrainingArguments cannot express"):
        to("bf16_with_fp8_current_scaling_mixed", "transformers")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert arguments_of(**to("bf16_with_fp8_current_scaling_mixed", "transformers")).mixed_precision == "fp8"
    assert arguments_of(bf16=True).mixed_precision == "bf16", "transformers no longer drops fp8: bf16 may stay"


def test_tf32_is_refused_by_the_trainer_itself_without_a_gpu(arguments_of: Any) -> None:
    assert to("tf32", "transformers")["tf32"] is True
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="tf32 requires Ampere"):
            arguments_of(**to("tf32", "transformers"))
    assert arguments_of(**to("fp32", "transformers")).tf32 is False


# --- Transformer Engine ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        (
            "bf16_with_fp8_delayed_scaling_mixed",
            {"recipe": "DelayedScaling", "fp8_format": "HYBRID", "margin": 0, "amax_history_len": 1024,
             "amax_compute_algo": "max", "reduce_amax": True, "fp8_dpa": False, "fp8_mha": False},
        ),
        (
            "fp16_with_fp8_current_scaling_mixed",
            {"recipe": "Float8CurrentScaling", "fp8_format": "HYBRID", "fp8_dpa": False, "fp8_mha": False,
             "backward_override": None},
        ),
        (
            "bf16_with_fp8_subchannel_scaling_mixed",
            {"recipe": "Float8BlockScaling", "fp8_format": "HYBRID", "backward_override": None},
        ),
        (
            "bf16_with_mxfp8_mixed",
            {"recipe": "MXFP8BlockScaling", "fp8_format": "E4M3", "margin": 0, "fp8_dpa": False, "fp8_mha": False,
             "backward_override": None},
        ),
        ("bf16_with_nvfp4_mixed", {"recipe": "NVFP4BlockScaling"}),
        (
            Policy(bf16=True, fp8="hybrid", fp8_fast_accum=True, fp8_dot_product_attention=True),
            {"recipe": "Float8CurrentScaling", "fp8_format": "HYBRID", "fp8_dpa": True, "fp8_mha": False,
             "backward_override": None,
             "fp8_gemm_dgrad": {"use_split_accumulator": False}, "fp8_gemm_wgrad": {"use_split_accumulator": False}},
        ),
    ],
)  # fmt: skip
def test_transformer_engine_arguments(policy: Policy | str, arguments: dict[str, Any]) -> None:
    """The objects themselves are built in tests/gpu/test_te_objects.py, where the library is installed."""
    policy = mpguard.recipe(policy) if isinstance(policy, str) else policy
    assert get("te").build_arguments(policy) == arguments


@pytest.mark.parametrize("name", ["bf16_mixed", "fp32", "bf16_with_fp8_rowwise_mixed"])
def test_transformer_engine_refuses_what_it_does_not_have(name: str) -> None:
    with pytest.raises(PolicyError, match=r"^te: "):
        mpguard.recipe(name).to("te")


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get("te"), "module", "a_library_that_nobody_has")
    with pytest.raises(MissingExtra) as raised:
        mpguard.recipe("bf16_with_mxfp8_mixed").to("te")
    assert (raised.value.name, raised.value.extra) == ("a_library_that_nobody_has", "te")
    assert isinstance(raised.value, ImportError)
    assert str(raised.value) == (
        "target `te` needs `a_library_that_nobody_has`, which is not installed: pip install 'mpguard[te]'"
    )


# --- Megatron Bridge, NeMo, axolotl ---------------------------------------------------------------

#: `MixedPrecisionConfig` at 067f987, field for field, with its defaults.
DEFAULTS: dict[str, Any] = {
    "fp32": False, "fp16": False, "bf16": False, "params_dtype": None, "pipeline_dtype": None, "autocast_dtype": None,
    "autocast_enabled": False, "grad_reduce_in_fp32": True, "fp8": None, "fp8_recipe": "tensorwise",
    "first_last_layers_bf16": False, "fp8_margin": 0, "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent",
    "fp8_wgrad": True, "fp8_dot_product_attention": False, "fp8_multi_head_attention": False, "fp8_param": None,
    "fp8_param_gather": False, "fp4": None, "fp4_recipe": "nvfp4", "fp4_param": None, "fp4_param_gather": False,
    "loss_scale": None, "initial_loss_scale": 4294967296, "min_loss_scale": 1.0, "loss_scale_window": 1000,
    "hysteresis": 2, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}  # fmt: skip
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "grad_reduce_in_fp32": True}
FP16 = {"fp16": True, "params_dtype": torch.half, "pipeline_dtype": torch.half, "grad_reduce_in_fp32": False}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_margin": 0, "fp8_amax_history_len": 1024,
           "fp8_amax_compute_algo": "max", "fp8_param_gather": True}  # fmt: skip
CURRENT = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}
SUBCHANNEL = {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False}
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
NVFP4 = {"fp8": None, "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8_param_gather": False, "fp4_param_gather": True}


def ends(start: int, end: int) -> dict[str, Any]:
    return {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}


#: Its fourteen recipes, field for field: independent of mpguard/policy/recipes.py.
MEGATRON_BRIDGE: dict[str, dict[str, Any]] = {
    "bf16_mixed": BF16,
    "fp16_mixed": FP16,
    "bf16_with_fp8_delayed_scaling_mixed": BF16 | DELAYED,
    "fp16_with_fp8_delayed_scaling_mixed": FP16 | DELAYED,
    "bf16_with_fp8_current_scaling_mixed": BF16 | CURRENT | ends(1, 1),
    "fp16_with_fp8_current_scaling_mixed": FP16 | CURRENT | ends(1, 1),
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": BF16 | CURRENT | ends(2, 2),
    "nanov2_bf16_with_fp8_current_scaling_mixed": BF16 | SUBCHANNEL | {"fp8_param_gather": True} | ends(2, 2),
    "bf16_with_fp8_subchannel_scaling_mixed": BF16 | SUBCHANNEL,
    "fp16_with_fp8_subchannel_scaling_mixed": FP16 | SUBCHANNEL,
    "bf16_with_mxfp8_mixed": BF16 | MXFP8,
    "fp16_with_mxfp8_mixed": FP16 | MXFP8,
    "bf16_with_nvfp4_mixed": BF16 | NVFP4,
    "nemotron_3_super_bf16_with_nvfp4_mixed": BF16 | NVFP4 | ends(0, 14),
}


@pytest.mark.parametrize("name", BRIDGE)
def test_our_recipes_are_megatron_bridges_field_for_field(name: str) -> None:
    assert DEFAULTS | to(name, "megatron") == DEFAULTS | MEGATRON_BRIDGE[name]


@pytest.mark.parametrize("name", BRIDGE)
def test_megatron_bridges_own_configs_are_read_as_our_recipes(name: str) -> None:
    theirs = DEFAULTS | MEGATRON_BRIDGE[name]
    finalized = theirs | {"fp8_param": theirs["fp8_param_gather"], "fp4_param": theirs["fp4_param_gather"]}
    for config in (theirs, finalized):
        assert Policy.of(get("megatron").read(config)) == mpguard.recipe(name)


def test_megatron_fields_without_effect_are_not_read() -> None:
    config = DEFAULTS | BF16 | {"loss_scale": 5.0, "fp8_amax_history_len": 1024, "num_layers_at_end_in_bf16": 3}
    assert Policy.of(get("megatron").read(config)) == mpguard.recipe("bf16_mixed")


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({"trainer": {"precision": "bf16"}, "model": {"megatron_amp_O2": True}}, Policy(bf16=True)),
        (
            {"trainer": {"precision": "bf16-mixed"}, "model": {"megatron_amp_O2": False, "fp8": False}},
            Policy(bf16=True, params_dtype="fp32"),
        ),
        (
            {"trainer": {"precision": 16}, "model": {"native_amp_init_scale": 65536, "hysteresis": 4}},
            Policy(fp16=True, initial_loss_scale=65536.0, hysteresis=4),
        ),
        ({"trainer": {"precision": 32}, "model": {}}, Policy()),
        (
            # the FP8 arguments alone, as its documentation lists them
            {"transformer_engine": True, "fp8": True, "fp8_e4m3": False, "fp8_hybrid": True, "fp8_margin": 0,
             "fp8_interval": 1, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max", "reduce_amax": False,
             "fp8_params": True},
            Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=1024,
                   fp8_amax_compute_algo="max", reduce_amax=False, fp8_param=True),
        ),
        (
            {"transformer_engine": True, "fp8": True, "fp8_e4m3": True, "fp8_hybrid": False},
            Policy(bf16=True, fp8="e4m3", fp8_recipe="delayed"),
        ),
        ({"transformer_engine": True, "fp8": True}, Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed")),
    ],
)  # fmt: skip
def test_nemo_arguments_are_read(config: dict[str, Any], policy: Policy) -> None:
    assert Policy.of(get("nemo").read(config)) == policy


def test_nemo_fp8_without_transformer_engine_is_refused() -> None:
    with pytest.raises(PolicyError, match="NeMo ignores FP8 then"):
        get("nemo").read({"transformer_engine": False, "fp8": True})


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, Policy(bf16=True)),  # its default is `bf16: auto`
        ({"bf16": "auto"}, Policy(bf16=True)),
        ({"bf16": True, "tf32": False}, Policy(bf16=True, tf32=False)),
        ({"bf16": "auto", "fp16": True}, Policy(fp16=True)),
        ({"bf16": "full"}, mpguard.recipe("bf16_full")),
        ({"bf16": False, "bfloat16": True}, mpguard.recipe("bf16_full")),
        ({"bf16": False}, Policy()),
        (
            {"bf16": True, "fp8": True, "fp8_enable_fsdp_float8_all_gather": True, "torch_compile": True},
            Policy(bf16=True, fp8="hybrid", fp8_param_gather=True, compile=True),
        ),
        ({"fp8": True}, Policy(bf16=True, fp8="hybrid")),
    ],
)
def test_axolotl_options_are_read(config: dict[str, Any], policy: Policy) -> None:
    assert Policy.of(get("axolotl").read({"base_model": "x", **config})) == policy


def test_axolotls_refused_full_becomes_bfloat16() -> None:
    config = {"base_model": "x", "bf16": "full", "micro_batch_size": 1}
    fixed, _ = inject(config, mpguard.recipe("bf16_full"), "axolotl")
    assert (fixed["bf16"], fixed["bfloat16"]) == (False, True)


@pytest.mark.parametrize("name", ["bf16_with_fp8_delayed_scaling_mixed", "fp16_with_fp8_current_scaling_mixed"])
def test_axolotl_refuses_fp8_that_it_does_not_have(name: str) -> None:
    with pytest.raises(PolicyError, match=r"^axolotl: "):
        mpguard.recipe(name).to("axolotl")


# --- defaults -------------------------------------------------------------------------------------


def test_the_defaults_that_settings_state_are_those_of_the_libraries() -> None:
    pytest.importorskip("deepspeed")
    from accelerate.commands.launch import launch_command_parser
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

    sections = {"bf16": DeepSpeedBF16Config(), "fp16": DeepSpeedFP16Config()}
    settings = get("deepspeed").settings(mpguard.recipe("fp16_mixed"), "deepspeed-zero2")
    stated = {key: setting.default for key, setting in settings.items() if setting.default is not ABSENT}
    assert len(stated) == 7
    for key, default in stated.items():
        section, name = key.split(".")
        assert getattr(sections[section], name) == default, key
    arguments = launch_command_parser().parse_args(["train.py"])
    for recipe in ("bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_rowwise_mixed", "bf16_with_mxfp8_mixed"):
        found = get("accelerate").settings(mpguard.recipe(recipe).replace(fp8_param=None), "fsdp2")
        for key, setting in found.items():
            if setting.default is not ABSENT and not key.startswith("fp8_config.fp8_fp8"):
                name = "fp8_" + key.removeprefix("fp8_config.").removeprefix("fp8_")
                assert getattr(arguments, name) == setting.default, key


# --- a recipe per module --------------------------------------------------------------------------


MODULES = (
    {"pattern": "*.layers.0.*", "recipe": "none"},
    {"pattern": "*.linear_fc?", "recipe": "mxfp8"},
    {"pattern": "*.linear_qkv", "recipe": "tensorwise"},
)


def test_megatron_gets_a_quant_recipe_and_its_patterns_are_read_back() -> None:
    policy = Policy(bf16=True, fp8="hybrid", fp8_recipe="blockwise", backend="te", fp8_modules=MODULES)
    config, changes = mpguard.inject({"train": {}, "mixed_precision": "bf16_mixed"}, policy, "megatron-bridge")
    found = config["model"]["quant_recipe"]
    assert found["_target_"] == "megatron.core.quantization.quant_config.RecipeConfig.from_config_dict"
    assert [each["pattern"] for each in found["config"]["matchers"].values()] == [each["pattern"] for each in MODULES]
    kind = {"transformer_engine_config_type": "TEQuantizationParams"}
    assert found["config"]["configs"] == {
        "none": {**kind, "training_recipe": {}},
        "mxfp8": {**kind, "training_recipe": {"fp8_quantization_recipe": "mxfp8", "fp8_format": "e4m3"}},
        "tensorwise": {**kind, "training_recipe": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"}},
    }
    read = Policy.of(get("megatron-bridge").read(config))
    assert read.fp8_modules == policy.fp8_modules and read.fp8_recipe == "blockwise"
    assert mpguard.inject(config, policy, "megatron-bridge")[1] == []
    found["config"]["matchers"] = dict(reversed(found["config"]["matchers"].items()))
    assert [each.key for each in mpguard.inject(config, policy, "megatron-bridge")[1]] == ["model.quant_recipe"]
    removed, _ = mpguard.inject(config, policy.replace(fp8_modules=()), "megatron-bridge")
    assert "quant_recipe" not in removed.get("model", {}) and changes


def test_megatrons_delayed_scaling_is_that_of_the_model() -> None:
    """`TEQuantizationRecipe.parse_from_config` of Megatron Core raises for a recipe `delayed`."""
    entries = [{"pattern": "*.linear_qkv", "recipe": "none"}, {"pattern": "*.linear_fc?", "recipe": "delayed"}]
    policy = mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed").replace(fp8_modules=entries)
    config, _ = mpguard.inject({"train": {}}, policy, "megatron-bridge")
    recipes = {
        name: each["training_recipe"] for name, each in config["model"]["quant_recipe"]["config"]["configs"].items()
    }
    assert recipes == {"none": {}, "delayed": {"override_quantized_autocast": False}}
    read = Policy.of(get("megatron-bridge").read(config))
    assert read.fp8_modules == policy.fp8_modules and read.fp8_recipe == "delayed"


def test_what_megatron_cannot_do_per_module_is_refused_or_reported() -> None:
    policy = Policy(bf16=True, fp8="hybrid", backend="te", fp8_modules=MODULES[2:])
    with pytest.raises(PolicyError, match="tensorwise_with_bwd_hp has its backward pass in high precision"):
        to(policy.replace(fp8_recipe="tensorwise_with_bwd_hp"), "megatron-bridge")
    with pytest.raises(PolicyError, match="fp8_param is True with fp8_modules"):
        to(policy.replace(fp8_param=True), "megatron-bridge")
    for target in ("megatron", "te", "accelerate"):
        able = policy.replace(backend="auto") if target == "accelerate" else policy
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mpguard.inject({}, able, target)
        texts = [str(each.message) for each in caught]
        assert any("fp8_modules=[*.linear_qkv" in text and "megatron-bridge" in text for text in texts), texts


def test_torchao_gets_a_config_and_a_filter_for_each_recipe() -> None:
    pytest.importorskip("torchao")
    from torch import nn
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    entries = [{"pattern": "0.*", "recipe": "none"}, {"pattern": "*.up", "recipe": "rowwise"}]
    policy = Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True, fp8_modules=entries)
    block = {"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}
    model = nn.Sequential(nn.ModuleDict(block), nn.ModuleDict({k: nn.Linear(32, 32) for k in block}))
    model.add_module("lm_head", nn.Linear(32, 64))
    for config, of_recipe in to(policy, "torchao"):
        convert_to_float8_training(model, config=config, module_filter_fn=of_recipe)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Float8Linear)}
    kinds = {name: each.config.cast_config_input.scaling_granularity.name for name, each in layers.items()}
    assert kinds == {"1.up": "AXISWISE", "1.down": "TENSORWISE"}


def test_a_backward_pass_in_high_precision_is_a_field_of_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipes ignore arguments that they do not know, so that the object is compared."""

    @dataclasses.dataclass
    class New:
        fp8_format: str
        fp8_dpa: bool = False
        fp8_mha: bool = False
        backward_override: str | None = "dequantized"

    class Old:
        def __init__(self, **_ignored: Any) -> None: ...

    policy = Policy(bf16=True, fp8="hybrid", fp8_recipe="tensorwise_with_bwd_hp")
    assert policy.backends == ("te",)
    for kind in (New, Old):
        recipes = types.ModuleType("transformer_engine.common.recipe")
        vars(recipes).update(Float8CurrentScaling=kind, Format={"HYBRID": "HYBRID"})
        common = types.ModuleType("transformer_engine.common")
        vars(common)["recipe"] = recipes
        monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
        monkeypatch.setitem(sys.modules, "transformer_engine.common", common)
        monkeypatch.setattr(get("te"), "require", lambda: None)
        if kind is New:
            assert to(policy, "te").backward_override == "high_precision"
            assert to(policy.replace(fp8_recipe="tensorwise"), "te").backward_override is None, "not the variable's"
        else:
            with pytest.raises(PolicyError, match="has no backward pass in high precision"):
                to(policy, "te")
    with pytest.raises(PolicyError, match="only tensorwise supports it"):
        get("te").settings(policy.replace(fp8_fast_accum=True))
