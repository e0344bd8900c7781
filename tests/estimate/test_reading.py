"""A config.json that cannot be used: which file, which key, what is needed. Built-in models; no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpguard
from mpguard.core.errors import ConfigError
from mpguard.estimate import (
    FAMILIES,
    MEMORY_MIB,
    OPTIMIZERS,
    ModelConfig,
    Request,
    built_in,
    estimate,
    fitting,
    largest_batch,
    read_model,
)
from mpguard.estimate.gpus import architecture, memory_of
from mpguard.policy import hardware
from mpguard.targets.plugin import STRATEGIES

LLAMA = built_in()["llama-3.2-1b"]
BF16 = mpguard.recipe("bf16_mixed")

#: As on the models' pages.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-7b": 7_615_616_512, "mixtral-8x7b": 46_702_792_704, "gpt2": 124_439_808, "gemma-2b": 2_506_172_416,
    "phi-2": 2_779_683_840, "t5-base": 222_903_552, "bart-large": 406_291_456, "vit-base": 86_567_656,
    "gemma-2-2b": 2_614_341_888, "deepseek-v3": 671_026_404_352, "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672, "whisper-large-v3": 1_543_490_560, "clip-vit-large": 427_616_513,
}  # fmt: skip


def written(tmp_path: Path, values: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**LLAMA, "hidden_size": None}, "`hidden_size` is missing; an estimate for llama needs it"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "`vocab_size` is missing"),
        ({**LLAMA, "num_hidden_layers": "many"}, "`num_hidden_layers` is 'many'; a whole number above 0 is needed"),
        ({**LLAMA, "num_hidden_layers": True}, "`num_hidden_layers` is True"),
        ({**LLAMA, "intermediate_size": -1}, "`intermediate_size` is -1"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000; 2,000 is the most"),
        ({**LLAMA, "num_key_value_heads": 3}, "`num_attention_heads` is 32, which is no multiple of"),
        (
            {**LLAMA, "rope_parameters": {"partial_rotary_factor": "x"}},
            "(rope_parameters): `partial_rotary_factor` is 'x'; a number is needed",
        ),
        ({**LLAMA, "partial_rotary_factor": 2}, "`partial_rotary_factor` is 2.0; a number from 0 to 1 is needed"),
        ({"model_type": "llava", "text_config": {"model_type": "mamba"}}, "the decoder `mamba` is not known"),
        ({"model_type": "llava", "vision_config": {"model_type": "vit"}}, "the vision tower `vit` is not known"),
        ({**LLAMA, "attention_bias": "yes"}, "`attention_bias` is 'yes'; true or false is needed"),
        ({**LLAMA, "model_type": "lama"}, "in a copy of its config.json"),
        ({"hidden_size": 64}, "there is no `model_type`"),
        ([1, 2], "has no JSON object"),
        ('{"model_type": "llama", ', "is not JSON"),
        ("", "is not JSON"),
    ],
)
def test_what_cannot_be_read_is_named(values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        estimate(Request(read_model(written(tmp_path, values)), BF16))
    assert message in str(error.value) and "config.json" in str(error.value)


def test_a_model_is_a_file_a_folder_or_a_name(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA)
    found = {estimate(Request(read_model(each), BF16)).parameters for each in (path, str(tmp_path), "llama-3.2-1b")}
    assert found == {1_235_814_400}
    (tmp_path / "empty").mkdir()
    for name, message in (
        (str(tmp_path / "empty"), "has no config.json"),
        (str(tmp_path / "confg.json"), "did you mean"),
        ("llama-3.2-2b", "did you mean `llama-3.2-3b`"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_model(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_models_have_the_published_number_of_parameters(name: str) -> None:
    assert estimate(Request(read_model(name), BF16, length=64)).parameters == PUBLISHED[name]


def test_each_built_in_model_can_be_estimated() -> None:
    for name in built_in():
        found = estimate(Request(read_model(name), BF16, length=64))
        assert found.total > found.allocated > found.parameters * 4 * 4, name
    assert {values["model_type"] for values in built_in().values()} <= set(FAMILIES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "fsdp3"}, "did you mean `fsdp2`"),
        ({"optimizer": "adam"}, "did you mean `adamw`"),
        ({"batch": 0}, "batch is 0; 1 or more is needed"),
        ({"gpus": 2}, "strategy single has one process, not 2"),
        ({"offload": True}, "cannot keep the optimizer on the host"),
    ],
)
def test_requests_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Request(ModelConfig(LLAMA, "x"), BF16, **changes)


def test_rows_longer_than_a_table_of_positions() -> None:
    with pytest.raises(ConfigError, match="rows of 2048 tokens, but the model has 1024 positions"):
        estimate(Request(read_model("gpt2"), BF16))


def one(**more: Any) -> Any:
    return estimate(Request(ModelConfig(LLAMA, "x"), BF16, **{"batch": 4, "length": 1024, **more}))


def test_what_saves_memory_saves_memory() -> None:
    plain = one()
    assert one(checkpointing=True).per_gpu["activations"] < plain.per_gpu["activations"] / 5
    assert one(compiled=True).per_gpu["activations"] < plain.per_gpu["activations"]
    for name in OPTIMIZERS:
        assert one(optimizer=name).per_gpu["optimizer"] <= plain.per_gpu["optimizer"]
    sharded = {gpus: one(strategy="fsdp2", gpus=gpus).total for gpus in (2, 4, 8)}
    assert sharded[2] > sharded[4] > sharded[8]
    for strategy in STRATEGIES[2:]:
        kept, away = one(strategy=strategy, gpus=4), one(strategy=strategy, gpus=4, offload=True)
        assert away.total < kept.total and away.host > 0 and away.per_gpu["optimizer"] == 0


def test_fp8_of_transformer_engine_saves_inputs_in_one_byte() -> None:
    delayed = estimate(Request(ModelConfig(LLAMA, "x"), mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed").decided(),
                               batch=4, length=1024))  # fmt: skip
    assert delayed.per_gpu["fp8"] > 0 and delayed.per_gpu["activations"] < one().per_gpu["activations"]


def test_cached_fp8_weights_are_there_in_the_optimizers_step_too() -> None:
    policy = mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed").decided()
    plain, cached = (
        estimate(Request(ModelConfig(LLAMA, "x"), each, batch=1, length=1024, gpu="h100"))
        for each in (policy, policy.replace(fp8_weight_cache=True))
    )
    assert plain.moments["step"]["fp8"] == 0 and cached.moments["step"]["fp8"] == cached.per_gpu["fp8"]
    assert cached.per_gpu["fp8"] == plain.per_gpu["fp8"], "two bytes an element, as what a pass saves"


def test_experts_in_fp8_need_no_copies_of_their_weights() -> None:
    config = ModelConfig(built_in()["mixtral-8x7b"], "x")
    policy = mpguard.recipe("bf16_with_fp8_rowwise_mixed").decided()
    forward = {
        (gpu, experts): sum(
            estimate(Request(config, policy.replace(fp8_experts=experts), batch=1, length=1024, gpu=gpu))
            .moments["forward"]
            .values()
        )
        for gpu in ("h200", "b200")
        for experts in (False, True)
    }
    assert forward["h200", True] < forward["h200", False]
    assert forward["b200", True] == forward["b200", False], "only Hopper multiplies experts in FP8"


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    request = Request(ModelConfig(LLAMA, "x"), BF16, length=1024, gpu="a100-80gb")
    batch = largest_batch(request)
    assert one(batch=batch).fits("a100-80gb") and not one(batch=batch + batch // 32 + 1).fits("a100-80gb")
    assert largest_batch(Request(read_model("llama-2-70b"), BF16)) == 0
    assert "h200" in fitting(request)["single"] and "rtx2080" not in fitting(request)["single"]


def test_gpus_are_those_of_the_table_of_hardware() -> None:
    for name in MEMORY_MIB:
        assert architecture(name) in hardware.GPUS and memory_of(name) > 2**32
    assert memory_of("a100") == memory_of("a100-40gb")
    with pytest.raises(ConfigError, match="did you mean `h100`"):
        memory_of("h1000")
    with pytest.raises(ConfigError, match="`mi300x` is not known; did you mean `b300`"):
        memory_of("mi300x")
    with pytest.raises(ConfigError, match="their number is `--gpus 4 --gpu a100`"):
        memory_of("4x a100")


@pytest.mark.parametrize("name", ["24GB", "24 gb", "24GiB"])
def test_a_size_stands_for_a_gpu(name: str) -> None:
    """People ask what fits 24 GB, and have GPUs that the table lacks."""
    assert memory_of(name) == 24 * 2**30 and architecture(name) == "h100"
    assert memory_of("a100-40") == memory_of("a100-40gb") and architecture("A100 - 40".replace(" ", "")) == "a100"


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = "import sys; from mpguard.cli import main; main(['estimate', 'qwen3-30b-a3b', '--gpus', '8']); " \
           "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
