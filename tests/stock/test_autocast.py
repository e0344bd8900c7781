"""S34, S35 and S39: FP16 on the CPU under accelerate, compiled backward passes, autocast around a whole loop."""

from __future__ import annotations

from pathlib import Path

from paths import TESTS
from processes import in_fork, mp_yaml, results, run_python, transcript
from stock import PROGRAMS, fixed_upstream

ACCELERATED = TESTS / "programs" / "accelerated.py"


def test_s34_accelerate_computes_fp16_on_the_cpu_in_fp32(tmp_path: Path) -> None:
    stock = in_fork([ACCELERATED, "--mixed-precision", "fp16"], cwd=tmp_path, program=run_python)
    assert stock.returncode == 0, transcript(stock)
    assert (results(stock)[0]["mode"], results(stock)[0]["compute"]) == ("fp16", "torch.float32"), fixed_upstream(34)

    fp8 = "{mpguard_recipe: fp16_mixed, mpguard_overrides: {initial_loss_scale: 1024.0}}"
    config = mp_yaml(tmp_path, mixed_precision="fp16", fp8_config=fp8)
    run = in_fork(["--config", config, ACCELERATED], cwd=tmp_path)
    assert run.returncode == 0 and results(run)[0]["compute"] == "torch.float16", transcript(run)


def test_s35_a_compiled_backward_runs_under_autocast(tmp_path: Path) -> None:
    """Its matmuls have another dtype than in eager."""
    program = PROGRAMS / "compiled_backward.py"
    stock = in_fork([program], cwd=tmp_path, program=run_python)
    assert stock.returncode == 0, transcript(stock)
    assert (results(stock)[0]["equal"], results(stock)[0]["rounded"]) == (False, True), fixed_upstream(35)

    run = in_fork(["--enforce", "warn", program], cwd=tmp_path, MPGUARD_POLICY='{"bf16": true}')
    assert run.returncode == 0, transcript(run)
    assert (results(run)[0]["equal"], results(run)[0]["rounded"]) == (True, False), transcript(run)


def test_s39_autocast_around_a_loop_multiplies_by_the_weights_of_the_first_step(tmp_path: Path) -> None:
    program = PROGRAMS / "autocast_around_loop.py"
    stock = in_fork([program], cwd=tmp_path, program=run_python)
    assert stock.returncode == 0, transcript(stock)
    losses = results(stock)[0]
    assert losses["around_loop"] > losses["in_each_step"] + 0.01, fixed_upstream(39)

    run = in_fork(["--config", mp_yaml(tmp_path), program], cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    assert results(run)[0]["around_loop"] == results(run)[0]["in_each_step"] == losses["in_each_step"], transcript(run)
    assert transcript(run).count("optimizer.step() runs inside of autocast") == 1
