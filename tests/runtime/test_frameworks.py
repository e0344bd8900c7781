"""Each framework with real processes on the CPU: the policy is in force, and a run with another precision is refused.

Own loops in every engine run under torchrun with gloo and two ranks. accelerate applies its own FSDP
and DeepSpeed with several processes on a GPU only (S23): here only what it is handed is checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import (
    command,
    free_port,
    in_fork,
    launch_in_forks,
    mp_yaml,
    on_ranks,
    proof,
    results,
    run_python,
    transcript,
)

LOOP = PROGRAMS / "loop.py"

#: Of the gradients 1 and 2**-10 of two ranks. BF16 holds 0.5 only.
MEAN = 0.5 + 2.0**-11

ENGINES = {
    "ddp": ("MULTI_CPU", {}),
    "fsdp1": ("FSDP", {"fsdp_config": "{fsdp_version: 1}"}),
    "fsdp2": ("FSDP", {"fsdp_config": "{fsdp_version: 2}"}),
    "zero1": ("DEEPSPEED", {"deepspeed_config": "{zero_stage: 1}"}),
    "zero2": ("DEEPSPEED", {"deepspeed_config": "{zero_stage: 2}"}),
    "zero3": ("DEEPSPEED", {"deepspeed_config": "{zero_stage: 3}"}),
}


def engine_config(folder: Path, engine: str) -> Path:
    kind, keys = ENGINES[engine]
    return mp_yaml(folder, distributed_type=kind, num_processes=2, **keys)


@pytest.mark.parametrize("engine", ENGINES)
def test_custom_loops_are_proven_and_reduce_in_fp32(tmp_path: Path, engine: str) -> None:
    """The script configures its engine to reduce in BF16, or uses its default; the policy requires FP32."""
    config = engine_config(tmp_path, engine)
    words = ("-m", "mpguard.run", "--config", config, "--proof-json", tmp_path / "proof.json", LOOP, engine)
    run = on_ranks(*words, "--steps", 5, cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    assert [(found["world"], found["gradient"]) for found in results(run)] == [(2, MEAN)] * 2, "shown by the values"
    assert "\nin force at steps 1-4 of 5 (3 checks)\n" in run.stderr, transcript(run)
    made = proof(tmp_path / "proof.json")
    seen = made["observed"]
    assert made["verdict"] == "in force" and seen["engine"].endswith(engine)
    assert seen["reductions"].keys() == {"fp32"} and seen["reduced_by"] == "the collective"
    assert seen["compute"].keys() == {"bf16"}
    assert (seen["masters"].keys(), seen["gradients"].keys(), seen["states"].keys()) == ({"fp32"},) * 3
    assert seen["parameters"].keys() == {"bf16" if engine.startswith("zero") else "fp32"}


EMULATED = "{mpguard_recipe: hopper_bf16_with_fp8_mixed, mpguard_overrides: {backend: torchao, fp8_emulate: true}}"


@pytest.mark.parametrize("engine", ENGINES)
def test_custom_loops_are_converted_to_fp8(tmp_path: Path, engine: str) -> None:
    """The script does not mention FP8. FSDP wraps the model before the optimizer is created, DeepSpeed after."""
    kind, keys = ENGINES[engine]
    fp8 = {"mixed_precision": "fp8", "fp8_config": EMULATED}
    config = mp_yaml(tmp_path, distributed_type=kind, num_processes=2, **keys, **fp8)
    words = ("-m", "mpguard.run", "--config", config, "--proof-json", tmp_path / "proof.json", LOOP, engine)
    run = on_ranks(*words, cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    assert [(found["world"], found["gradient"]) for found in results(run)] == [(2, MEAN)] * 2
    seen = proof(tmp_path / "proof.json")["observed"]
    assert (seen["fp8"]["converted"], seen["fp8"]["emulated"]) == (["0"], True)
    assert seen["engine"].endswith(engine) and seen["compute"].keys() == {"fp8"}
    assert seen["reductions"].keys() == seen["masters"].keys() == {"fp32"}


def test_fsdp1_keeps_the_parameters_that_fp8_layers_need(tmp_path: Path) -> None:
    """With the default of `use_orig_params` there would be no weights to convert."""
    fp8 = {"mixed_precision": "fp8", "fp8_config": EMULATED}
    config = mp_yaml(tmp_path, distributed_type="FSDP", num_processes=2, fsdp_config="{fsdp_version: 1}", **fp8)
    words = ("-m", "mpguard.run", "--config", config, "--proof-json", tmp_path / "proof.json", LOOP, "fsdp1", "--flat")
    run = on_ranks(*words, cwd=tmp_path)
    assert run.returncode == 0 and "use_orig_params: false -> true" in run.stderr, transcript(run)
    assert proof(tmp_path / "proof.json")["observed"]["fp8"]["converted"] == ["0"]


def test_accelerate_gets_bf16_and_mpguard_converts_its_model_to_fp8(tmp_path: Path) -> None:
    """accelerate's own conversion supports neither the recipes nor exclusion by name."""
    config = mp_yaml(tmp_path, mixed_precision="fp8", fp8_config=EMULATED)
    arguments = ["--config", config, "--proof-json", tmp_path / "proof.json", PROGRAMS / "accelerated.py"]
    run = in_fork(arguments, cwd=tmp_path, ACCELERATE_MIXED_PRECISION="fp8", ACCELERATE_FP8_BACKEND="TE")
    assert run.returncode == 0, transcript(run)
    (found,) = results(run)
    assert (found["mode"], found["compute"], found["master"]) == ("bf16", "torch.bfloat16", "torch.float32")
    seen = proof(tmp_path / "proof.json")["observed"]["fp8"]
    assert (seen["converted"], seen["left"]) == (["0"], {"2": "4 is not a multiple of 16"})


def test_the_gradient_shows_a_reduction_in_bf16(tmp_path: Path) -> None:
    """The control: without the policy the same script reduces in BF16."""
    run = on_ranks(LOOP, "fsdp2", cwd=tmp_path)
    assert [found["gradient"] for found in results(run)] == [0.5, 0.5], transcript(run)


@pytest.mark.parametrize(
    ("engine", "dtype", "expected"),
    [
        ("fsdp2", "float16", "the step began before mpguard could record it); asked: bf16"),
        ("fsdp2", "bfloat16", "reduction: bf16 (the collective); asked: fp32"),
        # The script also reads a gradient, in FP32: that is no reduction of gradients.
        ("zero2", "bfloat16", "reduction: bf16 (the collective); asked: fp32"),
    ],
)
def test_an_engine_built_before_activation_is_not_in_force(
    tmp_path: Path, engine: str, dtype: str, expected: str
) -> None:
    """FSDP's own policy against the run's (S12): all ranks raise, none continues or hangs."""
    run = on_ranks(LOOP, engine, "--dtype", dtype, "--activate", "bf16_mixed", cwd=tmp_path)
    assert run.returncode == 1 and results(run) == [], transcript(run)
    assert "mpguard: not in force: " in run.stderr and expected in run.stderr, transcript(run)
    assert ["NotInForce" in (tmp_path / f"raised.{rank}").read_text() for rank in (0, 1)] == [True, True]


def test_an_optimizer_that_was_built_before_activation_is_proven(tmp_path: Path) -> None:
    run = in_fork([LOOP, "plain", "--activate", "bf16_mixed"], cwd=tmp_path, program=run_python)
    assert run.returncode == 0 and "step 1 proven in force on 1 process" in run.stderr, transcript(run)


def test_a_communication_hook_is_observed_at_the_collective(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    run = on_ranks("-m", "mpguard.run", "--config", config, LOOP, "ddp", "--compress", cwd=tmp_path)
    assert run.returncode == 1 and "reduction: bf16 (the collective); asked: fp32" in run.stderr, transcript(run)


def test_a_mismatch_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """Rank 1 ends before its first step; rank 0 gets its failure, and does not wait."""
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    words = ("-m", "mpguard.run", "--config", config, LOOP, "ddp", "--slow-rank", 1)
    run = on_ranks(*words, cwd=tmp_path)
    assert run.returncode == 1 and results(run) == [], transcript(run)
    assert "not proven: rank 1: the run computed gradients and ended" in (tmp_path / "raised.0").read_text()


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path)
    run = launch_in_forks("--config", config, PROGRAMS / "trainer.py", cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    assert results(run) == [{"rank": 0, "compute": ["torch.bfloat16"], "steps": 2}]
    assert "proven in force on 1 process" in run.stderr and "in force at steps 1-2 (2 checks)" in run.stderr
    resumed = in_fork(["--config", config, PROGRAMS / "trainer.py", "--resume"], cwd=tmp_path)
    assert resumed.returncode == 0 and results(resumed)[0]["steps"] == 4, transcript(resumed)
    assert "proven in force on 1 process" in resumed.stderr, "a resumed run is proven at its first step"


def test_deepspeed_with_one_process_is_really_in_force(tmp_path: Path) -> None:
    """The one case in which accelerate applies DeepSpeed without a GPU (S23)."""
    config = mp_yaml(tmp_path, distributed_type="DEEPSPEED", deepspeed_config="{zero_stage: 2}")
    words = ("--config", config, "--proof-json", "proof.json", PROGRAMS / "accelerated.py")
    run = launch_in_forks(*words, cwd=tmp_path)
    assert run.returncode == 0 and results(run)[0]["type"] == "DistributedType.DEEPSPEED", transcript(run)
    assert proof(tmp_path / "proof.json")["observed"]["engine"] == "deepspeed-zero2"
    assert "in force at steps 1-8 (4 checks)" in run.stderr, transcript(run)


def test_a_deepspeed_file_without_a_precision_gets_the_policys(tmp_path: Path) -> None:
    """S24: accelerate exports nothing of `fp8_config` with a DeepSpeed file; the recipe reaches the workers anyway."""
    content = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 8}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    keys = {"deepspeed_config": "{deepspeed_config_file: ds.json}", "mixed_precision": None}
    config = mp_yaml(tmp_path, distributed_type="DEEPSPEED", **keys)
    run = launch_in_forks("--config", config, PROGRAMS / "accelerated.py", cwd=tmp_path)
    assert run.returncode == 0 and results(run)[0]["compute"] == "torch.bfloat16", transcript(run)
    assert "deepspeed-zero1" in run.stderr and "proven in force" in run.stderr
    assert json.loads((tmp_path / "ds.json").read_text()) == content


def test_the_deepspeed_launcher(tmp_path: Path) -> None:
    config = engine_config(tmp_path, "zero2")
    flags = ("--num_gpus", 2, "--master_port", free_port(), "--module")
    run = command("deepspeed", *flags, "mpguard.run", "--config", config, LOOP, "zero2", cwd=tmp_path)
    assert run.returncode == 0 and "proven in force on all 2 ranks" in run.stderr, transcript(run)


def activated(case: str, folder: Path) -> tuple[Any, str]:
    """Return what the libraries get after a policy was activated, and stderr; in a fork, as patches are not undone."""
    run = in_fork([PROGRAMS / "activated.py", case], cwd=folder, program=run_python)
    assert run.returncode == 0, transcript(run)
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


def test_accelerate_gets_the_fsdp_policy(tmp_path: Path) -> None:
    """The arguments only: accelerate applies FSDP on a GPU only."""
    found, errors = activated("fsdp", tmp_path)
    assert found == [["torch.bfloat16", "torch.float32", "bf16"]] * 2
    assert errors.count("fsdp_plugin.mixed_precision_policy: ") == 2, "each override is logged"


def test_training_arguments_get_the_precision_of_the_deepspeed_config(tmp_path: Path) -> None:
    """transformers refuses different values; mpguard puts the policy's into both."""
    pytest.importorskip("transformers", reason="the real library runs here")
    (stock, agreed, overridden), errors = activated("training_arguments", tmp_path)
    assert len(stock) == 1, "the control: without mpguard"
    assert agreed == [] and overridden == [] and "fp16: true -> false" in errors


def test_compile_auto_is_passed_to_accelerate_and_reported(tmp_path: Path) -> None:
    found, errors = activated("compiled", tmp_path)
    _, *parts = errors.split("-- ")
    reported = {name: text for name, _, text in (part.partition("\n") for part in parts) if "compile" in text}
    assert found == {
        "torchao": "INDUCTOR", "torchao, the script's backend": "AOT_EAGER", "delayed": "NO", "te": "INDUCTOR",
        "switched off": "NO", "bf16": "NO",
    }  # fmt: skip
    assert reported.keys() == {"torchao", "delayed"}
    assert "compile: auto is on here: torchao's casts" in reported["torchao"]
    assert "refuses delayed scaling under torch.compile" in reported["delayed"]


def test_a_checkpoint_that_transformers_loads_in_bf16_is_refused_with_the_line_to_change(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the real library runs here")
    config = mp_yaml(tmp_path)
    run = in_fork(["--config", config, PROGRAMS / "checkpoint.py"], cwd=tmp_path)
    assert run.returncode == 1 and "optimizer: AdamW, weights bf16" in run.stderr, transcript(run)
    line = (
        "`from_pretrained(NAME, dtype=torch.float32)`: transformers 5 loads a checkpoint in the dtype it was saved in"
    )
    assert line in run.stderr and "or train without master weights: recipe bf16_full" in run.stderr
    run = in_fork(["--config", config, PROGRAMS / "checkpoint.py", "float32"], cwd=tmp_path)
    assert run.returncode == 0 and "step 1 proven in force" in run.stderr, transcript(run)
    full = mp_yaml(tmp_path, recipe="bf16_full", mixed_precision="'no'")
    run = in_fork(["--config", full, PROGRAMS / "checkpoint.py"], cwd=tmp_path)
    assert run.returncode == 0 and "step 1 proven in force" in run.stderr, transcript(run)
