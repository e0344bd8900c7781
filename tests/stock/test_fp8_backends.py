"""S3, S10, S15, S16, S17, S40, and mpguard under S1, S2, S4, S14, S19: FP8 of accelerate and torchao on the CPU.

What Transformer Engine itself does needs a GPU: tests/gpu/test_stock_gpu.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("torchao", reason="the real library runs here")

import torch
from accelerate.utils import AORecipeKwargs, dataclasses
from accelerate.utils.ao import convert_model_to_fp8_ao, filter_first_and_last_linear_layers
from processes import in_fork, mp_yaml, proof, results, run_python, transcript
from stock import ENVIRONMENT, PROGRAMS, clean_accelerate, config, fixed_upstream, linted, mpguard
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.quantization import quantize_

import mpguard as package
from mpguard.nn import compile as compilation
from mpguard.policy import hardware
from mpguard.policy.hardware import Hardware
from mpguard.policy.policy import Policy
from mpguard.targets.plugin import plugins

DELAYED = Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=16)  # most_recent by default
EMULATED = Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True)
A100 = Hardware("A100", (8, 0), 1, (12, 9), {"te": "2.20", "torchao": "0.18"})


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(16, 16)


class Model(nn.Module):
    """An output head that is not the last layer, a router, and a layer with an odd size before others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lm_head, self.odd = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 24)
        self.choose, self.up, self.last = TopKRouter(), nn.Linear(16, 16), nn.Linear(16, 16)


def float8(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def refused(policy: Policy, strategy: str | None) -> str:
    with pytest.raises(package.PolicyError) as refusal:
        plugins()["accelerate"].build_arguments(policy, strategy)
    return str(refusal.value)


def test_s01_accelerates_own_fsdp2_path_is_refused_for_te(tmp_path: Path) -> None:
    """mpguard only. Its layers under FSDP2: tests/runtime/test_frameworks.py, tests/gpu/test_stock_gpu.py."""
    assert "accelerate never enters FP8 autocast: the run would be BF16" in refused(DELAYED, "fsdp2")
    keys = {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2}", "fp8_config": "{backend: TE}"}
    assert "MPG806" in {code for code, _ in linted(config(tmp_path, mixed_precision="fp8", **keys))}


def test_s02_accelerates_own_deepspeed_path_is_refused_for_te(tmp_path: Path) -> None:
    """mpguard only. Its layers under DeepSpeed: tests/runtime/test_frameworks.py, tests/gpu/test_stock_gpu.py."""
    assert "accelerate ignores TERecipeKwargs" in refused(DELAYED, "deepspeed-zero2")
    keys = {"distributed_type": "DEEPSPEED", "fp8_config": "{backend: TE, amax_history_len: 16}"}
    assert "MPG809" in {code for code, _ in linted(config(tmp_path, mixed_precision="fp8", **keys))}


def test_s03_most_recent_is_not_passed_on(tmp_path: Path) -> None:
    """The handler is accelerate's; its check that Transformer Engine is installed is mocked."""
    with clean_accelerate(), mock.patch.object(dataclasses, "is_transformer_engine_available", lambda: True):
        handler = dataclasses.TERecipeKwargs(amax_compute_algo="most_recent", amax_history_len=16)
        assert handler.to_kwargs() == {"amax_history_len": 16}, fixed_upstream(3)

    assert plugins()["te"].build_arguments(DELAYED)["amax_compute_algo"] == "most_recent"
    assert "default of TERecipeKwargs and therefore not passed on" in refused(DELAYED, None)
    section = "{backend: TE, amax_compute_algo: most_recent}"
    assert "MPG809" in {code for code, _ in linted(config(tmp_path, mixed_precision="fp8", fp8_config=section))}


def test_s04_arguments_that_te_drops_are_never_written(tmp_path: Path) -> None:
    """The part with mpguard."""
    assert not {"interval", "override_linear_precision"} & plugins()["te"].build_arguments(DELAYED).keys()
    section = "{backend: TE, interval: 4, override_linear_precision: [false, false, true]}"
    path = config(tmp_path, mixed_precision="fp8", fp8_config=section)
    assert "MPG809" in {code for code, _ in linted(path)}
    code = tmp_path / "train.py"
    code.write_text(
        "from transformer_engine.common.recipe import DelayedScaling\n\nrecipe = DelayedScaling(interval=4)\n"
    )
    assert linted(code) == {("MPG407", 3)}


def test_s10_fp8_on_an_old_gpu_becomes_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions of torch are mocked with the values of an A100; the model is on the CPU."""
    from accelerate import Accelerator

    with clean_accelerate(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
        assert (accelerator.mixed_precision, accelerator.scaler) == ("fp16", None), fixed_upstream(10)
        model = accelerator.prepare(nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))
        assert float8(model), fixed_upstream(10)

    monkeypatch.setattr(hardware, "detect", lambda: A100)
    path = mp_yaml(tmp_path, recipe="bf16_with_fp8_current_scaling_mixed", mixed_precision="fp8", use_cpu="false")
    result = mpguard("launch", "--config", path, ENVIRONMENT)
    assert result.status == 1, result
    assert "needs compute capability 8.9 or higher for FP8 (A100 has 8.0)" in result.err


def test_s14_only_the_odd_layer_is_skipped() -> None:
    """The part with mpguard; what accelerate's Transformer Engine path does is in tests/gpu/test_stock_gpu.py."""
    model = Model()
    done = package.convert(model, EMULATED)
    assert {"odd", "up", "last"} & float8(model) == {"up", "last"}
    assert dict(done.skipped)["odd"] == "24 is not a multiple of 16"


def test_s15_torchao_converts_routers_and_a_head_that_is_not_last() -> None:
    model = Model()
    convert_model_to_fp8_ao(model)
    assert float8(model) == {"lm_head", "choose.weight", "up"}, fixed_upstream(15)

    model = Model()
    done = package.convert(model, EMULATED)
    assert float8(model) == {"first", "up", "last"}
    skipped = dict(done.skipped)
    assert (skipped["lm_head"], skipped["choose.weight"]) == ("fp8_exclude", "MoE router")


def test_s16_the_public_filter_for_first_and_last_converts_everything() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    convert_to_float8_training(
        model, module_filter_fn=filter_first_and_last_linear_layers, config=Float8LinearConfig(emulate=True)
    )
    assert float8(model) == {"0", "1", "2", "3"}, fixed_upstream(16)

    with clean_accelerate():
        (handler,) = EMULATED.replace(fp8_exclude=("0", "3")).to("accelerate")["kwargs_handlers"]
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    convert_to_float8_training(model, module_filter_fn=handler.module_filter_func, config=handler.config)
    assert float8(model) == {"1", "2"}


def test_s17_with_all_gather_outside_fsdp2_the_converted_weights_never_train(tmp_path: Path) -> None:
    """One script with accelerate's defaults, without and with mpguard."""
    program = PROGRAMS / "accelerate_float8.py"
    run = in_fork([program], cwd=tmp_path, program=run_python)
    assert run.returncode == 0, transcript(run)
    (found,) = results(run)
    assert (found["kinds"]["1"], found["unchanged"]) == ("Float8Linear", ["1.weight", "2.weight"]), fixed_upstream(17)

    section = "{mpguard_recipe: hopper_bf16_with_fp8_mixed, mpguard_overrides: {backend: torchao, fp8_emulate: true}}"
    path = mp_yaml(tmp_path, mixed_precision="fp8", fp8_config=section)
    run = in_fork(["--config", path, "--proof-json", "proof.json", program], cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    (found,) = results(run)
    assert (found["unchanged"], set(found["kinds"].values())) == ([], {"TorchaoFloat8Linear"})
    assert proof(tmp_path / "proof.json")["observed"]["fp8"]["converted"] == ["0", "1", "2", "3"]
    assert "AORecipeKwargs: the script's -> (removed)" in run.stderr
    stock = config(tmp_path, mixed_precision="fp8", fp8_config="{backend: AO}")
    assert "MPG413" in {code for code, _ in linted(stock)}


def test_s19_delayed_scaling_under_compile_is_found(tmp_path: Path) -> None:
    """The part with mpguard."""
    code = tmp_path / "train.py"
    code.write_text(
        "import torch\nimport transformer_engine.pytorch as te\n"
        "from transformer_engine.common.recipe import DelayedScaling\n\n\n"
        "@torch.compile\ndef step(x):\n    with te.autocast(recipe=DelayedScaling()):\n        return layer(x)\n"
    )
    assert linted(code) == {("MPG402", 8)}
    assert compilation.choice(DELAYED).on is False, "under `compile: auto`"


def test_s40_the_conversion_to_mxfp8_drops_every_bias() -> None:
    def trained(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = model(torch.ones(32, 64))
        output.sum().backward()
        bias = model[0].bias
        return output.detach(), None if bias is None else bias.grad

    plain = nn.Sequential(nn.Linear(64, 32))
    nn.init.constant_(plain[0].bias, 5.0)
    stock, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    expected, _ = trained(plain)
    package.convert(ours, package.recipe("blackwell_bf16_with_mxfp8_mixed").replace(fp8_emulate=True, compile=False))
    output, gradient = trained(ours)
    assert torch.allclose(output, expected, atol=0.3) and gradient is not None and bool((gradient == 32).all())
    recipe = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    try:
        quantize_(stock, recipe, filter_fn=lambda module, _name: isinstance(module, nn.Linear))
    except AssertionError as error:
        assert "install the latest torch" in str(error)
        pytest.skip(f"torchao itself refuses this conversion with torch {torch.__version__}; mpguard's runs")
    output, gradient = trained(stock)
    assert torch.allclose(output + 5.0, expected, atol=0.3) and gradient is None, fixed_upstream(40)
