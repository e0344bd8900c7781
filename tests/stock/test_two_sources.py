"""S11, S12, S13: a precision that is said in two places, or in one that decides more than it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from processes import Program, in_fork, mp_yaml, ours, proof, ranks_in_fork, results, told
from stock import PROGRAMS, clean_accelerate, linted, mended, script

#: Of the gradients 1 and 2**-10 of two ranks. BF16 holds 0.5 only.
MEAN = 0.5 + 2.0**-11


def test_s11_training_arguments_turn_fp8_off(tmp_path: Path) -> None:
    program = PROGRAMS / "training_arguments.py"
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_USE_CPU": "true"}
    run = in_fork([program], cwd=tmp_path, program=script, **variables)
    assert run.returncode == 0, told(run)
    (found,) = results(run)
    assert found["unsaid"] == "fp8", "without `bf16=True` the variable decides"
    assert (found["mode"], set(found["kinds"])) == ("bf16", {"Linear"}), mended(11)
    with (
        clean_accelerate(ACCELERATE_FP8_BACKEND="AO"),
        pytest.raises(AttributeError, match="has no attribute 'config'"),
    ):
        Accelerator(cpu=True, mixed_precision="bf16").prepare(torch.nn.Linear(16, 16))  # what it is where one is named
        pytest.fail(mended(11))

    variables["ACCELERATE_FP8_BACKEND"] = "AO"
    section = "{mpguard_recipe: hopper_bf16_with_fp8_mixed, mpguard_overrides: {backend: torchao, fp8_emulate: true}}"
    path = mp_yaml(tmp_path, mixed_precision="fp8", fp8_config=section)
    run = in_fork(["--config", path, "--proof-json", "proof.json", program], cwd=tmp_path, **variables)
    assert run.returncode == 0, told(run)
    assert set(results(run)[0]["kinds"]) == {"Float8Linear"}
    assert proof(tmp_path / "proof.json")["rows"]["fp8"]["ok"]
    code = tmp_path / "train.py"
    code.write_text("from transformers import TrainingArguments\n\narguments = TrainingArguments(bf16=True)\n")
    assert ("MPG863", 3) in linted(code)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What FSDP2 did with the plugin's policies, as they are and under mpguard."""

    def run(program: Program) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("fsdp")
        words: list[object] = [PROGRAMS / "fsdp_policy.py"]
        if program is ours:
            keys = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": "{fsdp_version: 2}"}
            words = ["--config", mp_yaml(folder, **keys), *words]
        ranks = ranks_in_fork(words, cwd=folder, program=program)
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(map(told, ranks))
        (first,), (second,) = map(results, ranks)
        assert {**first, "rank": 1} == second
        return {**first, "said": ranks[0].stderr}

    return {"stock": run(script), "ours": run(ours)}


@pytest.mark.parametrize("version", [1, 2])
def test_s12_the_fsdp_policy_and_the_precision_are_never_compared(version: int) -> None:
    """What accelerate makes of a plugin; what FSDP makes of that is the next test."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, mixed_precision_policy="fp16")
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.param_dtype is torch.float16, mended(12)


def test_s12_a_policy_in_fp16_computes_in_fp16_and_mpguards_in_bf16(sharded: Any, tmp_path: Path) -> None:
    assert sharded["stock"]["fp16"][0] == "float16", mended(12)

    assert sharded["ours"]["fp16"] == ["bfloat16", MEAN], sharded["ours"]
    assert "param_dtype: float16 -> bfloat16" in sharded["ours"]["said"]
    mp_yaml(tmp_path, distributed_type="FSDP", num_processes=2)
    code = tmp_path / "train.py"
    code.write_text(
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n\n"
        'plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="fp16")\n'
        "accelerator = Accelerator(fsdp_plugin=plugin)\n"
    )
    assert linted(code) == {("MPG864", 3)}


@pytest.mark.parametrize("version", [1, 2])
def test_s13_accelerate_asks_fsdp_to_reduce_in_bf16(version: int) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision("bf16")
    policy = plugin.mixed_precision_policy
    wide = policy.buffer_dtype if version == 1 else policy.output_dtype
    assert (policy.reduce_dtype, wide) == (torch.bfloat16, torch.bfloat16), mended(13)


def test_s13_gradients_are_reduced_in_bf16_and_by_mpguard_in_fp32(sharded: Any) -> None:
    """Shown by a value that BF16 cannot hold."""
    assert sharded["stock"]["default"] == ["bfloat16", 0.5], mended(13)

    assert sharded["ours"]["default"] == ["bfloat16", MEAN], sharded["ours"]
    assert "reduce_dtype: bfloat16 -> float32" in sharded["ours"]["said"]
