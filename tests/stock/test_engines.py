"""S32: an engine that replaces the parameters of an existing optimizer."""

from __future__ import annotations

from pathlib import Path

from processes import Program, mp_yaml, ranks_in_fork, results, run_module, transcript
from stock import PROGRAMS, fixed_upstream, script


def test_s32_flat_parameters_leave_an_earlier_optimizer_behind(tmp_path: Path) -> None:
    def trains(program: Program) -> tuple[list[bool], str]:
        words: list[object] = [PROGRAMS / "flat_parameters.py"]
        if program is run_module:
            keys = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": "{fsdp_version: 1}"}
            words = ["--config", mp_yaml(tmp_path, **keys), *words]
        ranks = ranks_in_fork(words, cwd=tmp_path, program=program)
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(map(transcript, ranks))
        return [results(rank)[0]["changed"] for rank in ranks], ranks[0].stderr

    assert trains(script)[0] == [False, False], fixed_upstream(32)
    changed, output = trains(run_module)
    assert changed == [True, True] and "FullyShardedDataParallel: use_orig_params: false -> true" in output, output
    assert "proven in force on all 2 ranks" in output
