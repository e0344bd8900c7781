"""Tapes of models that run on the meta device: as those that are written by hand, and as what autograd saves."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from memory import saved_tensors
from tiny_models import inputs, tiny

import mpguard
from mpguard.core.errors import ConfigError
from mpguard.estimate import FAMILIES, Adapters, ModelConfig, Request, estimate
from mpguard.estimate.blocks import Batch
from mpguard.estimate.families import record
from mpguard.estimate.recording import recorded
from mpguard.estimate.replay import Replay
from mpguard.estimate.tape import FULL, HALF, Tape, TapeDtypes

ROWS, LENGTH, PATCHES = 2, 32, 64
CUDA_AUTOCAST = TapeDtypes(FULL, HALF, cuda=True)

#: Architectures without a program of their own, small; dropout off, because the CPU saves other masks than a GPU.
UNKNOWN: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt_bigcode": {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "nemotron": {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip


def unknown(name: str) -> tuple[Any, ModelConfig]:
    config = transformers.CONFIG_MAPPING[name](**UNKNOWN[name], vocab_size=512, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.train(), ModelConfig(json.loads(config.to_json_string(use_diff=False)), name)


def kept(tape: Tape) -> int:
    """Return the bytes that autograd keeps, of what is neither a weight nor an input."""
    storages = {storage for op in tape.ops for storage in op.saved}
    return sum(each.size for each in storages if each.kind not in ("weight", "input"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_program_saves_what_the_model_does_on_the_meta_device(name: str) -> None:
    """Under the autocast of CUDA, of which no other test on a CPU knows."""
    model, config = tiny(name)
    model = model.to("meta")
    model.tie_weights()
    batch = inputs(name, torch.float32, ROWS, LENGTH)
    real = recorded(model, {key: each.to("meta") if each.is_floating_point() else each for key, each in batch.items()},
                    CUDA_AUTOCAST)  # fmt: skip
    program = record(config, Batch(ROWS, LENGTH, PATCHES), CUDA_AUTOCAST)
    assert Counter(each.shape for each in real.weights.values()) == Counter(
        each.shape for each in program.weights.values()
    )
    near = 0.04 if name == "mistral3" else 0.02
    assert kept(program) == pytest.approx(kept(real), rel=near)
    peaks = [Replay(each).run().backward.total for each in (program, real)]
    assert peaks[0] == pytest.approx(peaks[1], rel=near)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_architecture_saves_what_autograd_saves(name: str, mode: str) -> None:
    precision = {"fp32": TapeDtypes(), "bf16": TapeDtypes(HALF, HALF), "autocast": TapeDtypes(FULL, HALF)}[mode]
    model, config = unknown(name)
    tape = record(config, Batch(ROWS, LENGTH), precision)
    assert Counter(each.shape for each in tape.weights.values()) == Counter(
        tuple(each.shape) for each in model.parameters()
    )
    model = model.to(torch.bfloat16 if mode == "bf16" else torch.float32)
    ids = torch.full((ROWS, LENGTH), 5)
    with (
        saved_tensors([*model.parameters(), *model.buffers(), ids]) as saved,
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"),
    ):
        loss = model(input_ids=ids, labels=ids).loss
        real = saved()
    del loss
    assert kept(tape) == pytest.approx(real, rel=0.02)


def test_infinity_is_read_as_transformers_writes_it() -> None:
    values = {
        "model_type": "falcon_h1", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4,
        "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16, "pad_token_id": 0,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }  # fmt: skip
    tape = record(ModelConfig(values, "config.json"), Batch(1, 16))
    assert tape.ops and sum(each.count for each in tape.weights.values()) > 64 * 128


def test_options_change_an_unknown_architecture_as_they_change_others() -> None:
    _, config = unknown("bloom")
    sizes = {}
    for name, changes in {
        "plain": {}, "fp8": {"policy": mpguard.recipe("bf16_with_fp8_current_scaling_mixed").decided()},
        "checkpointing": {"checkpointing": True}, "compiled": {"compiled": True},
        "fsdp2": {"strategy": "fsdp2", "gpus": 4}, "zero3": {"strategy": "deepspeed-zero3", "gpus": 4},
    }.items():  # fmt: skip
        request = {"policy": mpguard.recipe("bf16_mixed").decided(), "batch": 4, "length": 256, **changes}
        sizes[name] = estimate(Request(config, **request))
    plain = sizes["plain"].per_gpu
    assert sizes["checkpointing"].per_gpu["activations"] < 0.5 * plain["activations"]
    assert sizes["compiled"].per_gpu["activations"] < plain["activations"]
    for sharded in ("fsdp2", "zero3"):
        assert sizes[sharded].per_gpu["optimizer"] < 0.3 * plain["optimizer"]


def test_adapters_of_an_unknown_architecture() -> None:
    _, config = unknown("bloom")
    policy = mpguard.recipe("bf16_mixed").decided()
    found = estimate(Request(config, policy, length=64, adapters=Adapters(8, ("query_key_value",), "nf4")))
    assert found.trained == 3 * 8 * (64 + 3 * 64)  # layers, rank, inputs and outputs
    whole = estimate(Request(config, policy, length=64))
    assert found.per_gpu["parameters"] < whole.per_gpu["parameters"] and found.parameters > whole.parameters
    with pytest.raises(ConfigError, match=r"no Linear layer has this name; did you mean `query_key_value`"):
        estimate(Request(config, policy, length=64, adapters=Adapters(8, ("query_key_values",))))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llamma"}, r"`llamma` is known neither here .* nor to transformers 5"),
        ({"model_type": "falcon", "hidden_size": "wide"}, r"does not build `falcon` from it: .*hidden_size"),
        (
            {"model_type": "blip_2_qformer"},
            r"builds `blip_2_qformer`, .* none of the usual inputs \(text, images, sound\)",
        ),
    ],
)
def test_what_transformers_cannot_run_is_an_error_with_its_reason(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(ModelConfig(values, "config.json"), Batch(1, 16))
