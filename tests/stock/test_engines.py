"""S32, S36, S37: what engines do with the parameters of an existing optimizer, and with gradients in BF16."""

from __future__ import annotations

from pathlib import Path

from processes import Program, mp_yaml, ranks_in_fork, results, run_module, run_python, transcript
from stock import PROGRAMS, fixed_upstream


def test_s32_flat_parameters_leave_an_earlier_optimizer_behind(tmp_path: Path) -> None:
    def trains(program: Program) -> tuple[list[bool], str]:
        words: list[object] = [PROGRAMS / "flat_parameters.py"]
        if program is run_module:
            keys = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": "{fsdp_version: 1}"}
            words = ["--config", mp_yaml(tmp_path, **keys), *words]
        ranks = ranks_in_fork(words, cwd=tmp_path, program=program)
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(map(transcript, ranks))
        return [results(rank)[0]["changed"] for rank in ranks], ranks[0].stderr

    assert trains(run_python)[0] == [False, False], fixed_upstream(32)
    changed, output = trains(run_module)
    assert changed == [True, True] and "FullyShardedDataParallel: use_orig_params: false -> true" in output, output
    assert "proven in force on all 2 ranks" in output


def test_s36_gradients_of_norms_are_summed_over_tensor_parallel_ranks_in_bf16(tmp_path: Path) -> None:
    def dtypes(program: Program) -> list[str]:
        words: list[object] = [PROGRAMS / "reductions.py", "tp"]
        if program is run_module:
            keys = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": "{fsdp_version: 2}"}
            words = ["--config", mp_yaml(tmp_path, **keys), "--enforce", "warn", *words]
        ranks = ranks_in_fork(words, cwd=tmp_path, program=program)
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(map(transcript, ranks))
        return [results(rank)[0]["dtype"] for rank in ranks]

    assert dtypes(run_python) == ["bf16", "bf16"], fixed_upstream(36)
    assert dtypes(run_module) == ["float32", "float32"]


def test_s37_fsdp1_adds_gradients_in_bf16_without_synchronization(tmp_path: Path) -> None:
    """mpguard refuses it: tests/runtime/proof/test_step.py."""
    ranks = ranks_in_fork([PROGRAMS / "reductions.py", "no_sync"], cwd=tmp_path, program=run_python)
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(map(transcript, ranks))
    assert [results(rank)[0]["dtype"] for rank in ranks] == ["bfloat16", "bfloat16"], fixed_upstream(37)
