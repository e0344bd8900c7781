"""S11, S12, S13: a precision that is set in two places, or a setting that decides more than its name suggests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="the real library runs here")

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from processes import Program, in_fork, mp_yaml, proof, ranks_in_fork, results, run_module, run_python, transcript
from stock import PROGRAMS, clean_accelerate, fixed_upstream, linted

#: Of the gradients 1 and 2**-10 of two ranks. BF16 holds 0.5 only.
MEAN = 0.5 + 2.0**-11


def test_s11_training_arguments_turn_fp8_off(tmp_path: Path) -> None:
    program = PROGRAMS / "training_arguments.py"
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_USE_CPU": "true"}
    run = in_fork([program], cwd=tmp_path, program=run_python, **variables)
    assert run.returncode == 0, transcript(run)
    (found,) = results(run)
    assert found["unset"] == "fp8", "without `bf16=True` the variable decides"
    assert (found["mode"], set(found["kinds"])) == ("bf16", {"Linear"}), fixed_upstream(11)
    with (
        clean_accelerate(ACCELERATE_FP8_BACKEND="AO"),
        pytest.raises(AttributeError, match="has no attribute 'config'"),
    ):
        Accelerator(cpu=True, mixed_precision="bf16").prepare(
            torch.nn.Linear(16, 16)
        )  # with a backend in the environment, accelerate fails
        pytest.fail(fixed_upstream(11))

    variables["ACCELERATE_FP8_BACKEND"] = "AO"
    section = "{mpguard_recipe: hopper_bf16_with_fp8_mixed, mpguard_overrides: {backend: torchao, fp8_emulate: true}}"
    path = mp_yaml(tmp_path, mixed_precision="fp8", fp8_config=section)
    run = in_fork(["--config", path, "--proof-json", "proof.json", program], cwd=tmp_path, **variables)
    assert run.returncode == 0, transcript(run)
    assert set(results(run)[0]["kinds"]) == {"TorchaoFloat8Linear"}
    assert proof(tmp_path / "proof.json")["rows"]["fp8"]["ok"]
    code = tmp_path / "train.py"
    code.write_text("from transformers import TrainingArguments\n\narguments = TrainingArguments(bf16=True)\n")
    assert ("MPG863", 3) in linted(code)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what FSDP2 did with the plugin's policies, without and with mpguard."""

    def run(program: Program) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("fsdp")
        words: list[object] = [PROGRAMS / "fsdp_policy.py"]
        if program is run_module:
            keys = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": "{fsdp_version: 2}"}
            words = ["--config", mp_yaml(folder, **keys), *words]
        ranks = ranks_in_fork(words, cwd=folder, program=program)
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(map(transcript, ranks))
        (first,), (second,) = map(results, ranks)
        assert {**first, "rank": 1} == second
        return {**first, "stderr": ranks[0].stderr}

    return {"stock": run(run_python), "ours": run(run_module)}


def test_s12_the_fsdp_policy_and_the_precision_are_never_compared(sharded: Any, tmp_path: Path) -> None:
    stock, ours = sharded["stock"], sharded["ours"]
    assert (stock["fp16 policy"]["compute"], stock["fp16 policy"]["scaler"]) == ("float16", False), fixed_upstream(12)
    assert stock["no mode"]["master"] == "bfloat16", fixed_upstream(12)

    assert ours["fp16 policy"] == {"compute": "bfloat16", "master": "float32", "gradient": MEAN, "scaler": False}
    assert ours["no mode"]["master"] == "float32"
    assert "fsdp_plugin.mixed_precision_policy: MixedPrecisionPolicy(param_dtype=torch.float16" in ours["stderr"]
    mp_yaml(tmp_path, distributed_type="FSDP", num_processes=2)
    code = tmp_path / "train.py"
    code.write_text(
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n\n"
        'plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="fp16")\n'
        "accelerator = Accelerator(fsdp_plugin=plugin)\n"
    )
    assert linted(code) == {("MPG864", 3)}


def test_s13_accelerates_fsdp_reduces_in_bf16(sharded: Any) -> None:
    """Shown by a value that BF16 cannot represent; for FSDP 1 by the plugin that accelerate creates."""
    assert sharded["stock"]["no policy"]["gradient"] == 0.5, fixed_upstream(13)
    for version, field in ((1, "buffer_dtype"), (2, "output_dtype")):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        plugin.set_mixed_precision("bf16")
        policy = plugin.mixed_precision_policy
        assert (policy.reduce_dtype, getattr(policy, field)) == (torch.bfloat16, torch.bfloat16), fixed_upstream(13)

    assert sharded["ours"]["no policy"] == {
        "compute": "bfloat16",
        "master": "float32",
        "gradient": MEAN,
        "scaler": False,
    }
    # FSDP 1, and custom training loops: tests/runtime/test_frameworks.py
