"""LoRA and QLoRA: adapters and saved tensors are those of peft; what is stored of the base."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")

from memory import saved_tensors
from tiny_models import inputs, tiny

import mpguard
from mpguard.core.errors import ConfigError
from mpguard.estimate import Adapters, ModelConfig, Request, estimate, read_model, what_fits
from mpguard.estimate.adapters import MARK
from mpguard.estimate.blocks import Batch
from mpguard.estimate.families import record
from mpguard.estimate.tape import FULL, HALF, TapeDtypes

ROWS, LENGTH = 2, 32
TARGETS = [("llama", ("q_proj", "v_proj")), ("llama", ("all-linear",)), ("qwen3", ("gate_proj", "o_proj"))]
GIB = 2**30


#: The dtypes of the base and of the adapters; under autocast PEFT's default, adapters in FP32 on a base in BF16.
MODES = {"fp32": (torch.float32, FULL), "bf16": (torch.bfloat16, HALF), "autocast": (torch.bfloat16, FULL)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_adapters_and_saved_tensors_are_those_of_peft(name: str, targets: tuple[str, ...], mode: str) -> None:
    dtype, width = MODES[mode]
    autocast = mode == "autocast"
    model, config = tiny(name)
    wanted = "all-linear" if targets == ("all-linear",) else list(targets)
    lora = peft.LoraConfig(r=4, target_modules=wanted, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model.to(dtype), lora, autocast_adapter_dtype=autocast)
    batch = inputs(name, dtype, ROWS, LENGTH)
    tape = record(
        config, Batch(ROWS, LENGTH), TapeDtypes(width, HALF if autocast else width, adapters=Adapters(4, targets))
    )
    own = {each.name: each.shape for each in tape.weights.values() if MARK in each.name}
    trained = {key: tuple(each.shape) for key, each in model.named_parameters() if each.requires_grad}
    assert sorted(own.values()) == sorted(trained.values()) and len(own) > 0
    own_tensors = [*model.parameters(), *model.buffers(), *batch.values()]
    with saved_tensors(own_tensors) as saved, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    real = saved()
    del loss
    kept = {storage for op in tape.ops for storage in op.saved}
    found = sum(each.size for each in kept if each.kind not in ("weight", "input"))
    assert abs(found - real) <= 0.02 * real, f"estimated {found}, real {real}"


def llama() -> Request:
    policy = mpguard.recipe("bf16_mixed").decided()
    return Request(read_model("llama-3.1-8b"), policy, checkpointing=True)


@pytest.mark.parametrize(
    ("quantize", "base"),
    [
        (None, 8.03e9 * 2),  # BF16
        # 6.98 B weights of Linear layers in blocks; the embedding, the head and the norms are FP32
        ("nf4", 6.98e9 * 0.5625 + 1.05e9 * 4),
        ("int8", 6.98e9 + 1.05e9 * 4),
        ("fp8", 6.98e9 + 1.05e9 * 2),
    ],
)
def test_the_base_is_stored_as_it_is_loaded(quantize: str | None, base: float) -> None:
    found = estimate(dataclasses.replace(llama(), adapters=Adapters(16, quantize=quantize)))
    assert found.per_gpu["parameters"] == pytest.approx(base + found.trained * 4, rel=0.005)
    assert found.per_gpu["optimizer"] == found.trained * 8 and found.per_gpu["master_weights"] == 0
    assert found.trained == 41_943_040, "as peft counts for rank 16 on all Linear layers of Llama 3.1 8B"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"])
def test_each_strategy(strategy: str) -> None:
    single = estimate(dataclasses.replace(llama(), adapters=Adapters(16)))
    split = estimate(dataclasses.replace(llama(), adapters=Adapters(16), strategy=strategy, gpus=4))
    share = split.per_gpu["parameters"] / single.per_gpu["parameters"]
    assert share == pytest.approx(0.25 if strategy in ("fsdp1", "fsdp2", "deepspeed-zero3") else 1.0, rel=0.02)


def test_a_target_that_no_layer_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--targets q_prj: no Linear layer has this name; did you mean `q_proj`"):
        estimate(dataclasses.replace(llama(), adapters=Adapters(16, ("q_prj",))))
    with pytest.raises(ConfigError, match="--quantize nf5: not a known format"):
        Adapters(16, quantize="nf5")
    with pytest.raises(ConfigError, match="rank of LoRA"):
        Adapters(0)


def test_what_makes_it_fit_fits() -> None:
    request = dataclasses.replace(llama(), gpu="h100")
    assert not estimate(request).fits("h100")
    options = what_fits(request)
    assert "--lora 16 --checkpointing" in options and any("--gpus" in option for option in options)
    assert not any("adamw-fused" in option for option in options), "it does not fit, with 120 GiB"
    on_h200 = dataclasses.replace(request, gpu="h200")
    assert not estimate(on_h200).fits("h200") and "--optimizer adamw-fused" in what_fits(on_h200)


def test_a_fused_optimizer_has_no_buffers_and_bf16_states_are_half() -> None:
    found = {
        name: estimate(dataclasses.replace(llama(), optimizer=name)) for name in ("adamw", "adamw-fused", "adamw-bf16")
    }
    assert found["adamw"].peak == "step" and found["adamw-fused"].peak == "backward"
    assert found["adamw-fused"].per_gpu["optimizer"] == found["adamw"].per_gpu["optimizer"]
    assert 2 * found["adamw-bf16"].per_gpu["optimizer"] == found["adamw"].per_gpu["optimizer"]
    assert found["adamw-fused"].fits("h200") and not found["adamw"].fits("h200")
    assert found["adamw-fused"].total == pytest.approx(120.5 * GIB, rel=0.005)


def test_the_config_of_a_file_gets_adapters_too() -> None:
    _, config = tiny("llama")
    assert isinstance(config, ModelConfig)
    policy = mpguard.recipe("fp32").decided()
    found = estimate(Request(config, policy, length=LENGTH, adapters=Adapters(2, ("q_proj",))))
    assert 0 < found.trained < found.parameters
