"""S20 to S23 and S26: which processes the launchers start, and how they end."""

from __future__ import annotations

import concurrent.futures
import signal
from pathlib import Path

import pytest
from paths import PROGRAMS as SHARED
from processes import command, free_port, in_fork, mp_yaml, ranks_in_fork, results, run_python, transcript
from stock import (
    ENVIRONMENT,
    PROGRAMS,
    config,
    fixed_upstream,
    launched,
    mpguard,
    mpguard_launch,
)


def refused(path: Path, *after: object) -> str:
    """Return the refusal of `mpguard launch`, before anything starts."""
    result = mpguard("launch", "--config", path, ENVIRONMENT, *after)
    assert result.status == 1 and result.err.startswith("mpguard: not in force: "), result
    return result.err


def worlds(folder: Path, workers: list[dict[str, str]]) -> list[tuple[int, int, str, str]]:
    """Return rank, world size, engine and precision of `Accelerator()` in workers with these environments."""
    port = str(free_port())

    def found(worker: dict[str, str]) -> tuple[int, int, str, str]:
        variables = {**worker, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        run = in_fork([PROGRAMS / "world.py"], cwd=folder, program=run_python, **variables)
        assert run.returncode == 0, transcript(run)
        (line,) = results(run)
        return line["rank"], line["world"], line["engine"], line["mode"]

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(found, workers))


def test_s20_accelerate_has_no_config_flag(tmp_path: Path) -> None:
    path = mp_yaml(tmp_path)
    run = launched(tmp_path, "--config", path)
    assert run.status == 2 and run.workers == [] and "unrecognized arguments: --config" in run.output, fixed_upstream(
        20
    )
    run = launched(tmp_path, after=("--config", path))
    assert run.status == 0 and run.arguments == [["--config", str(path)]], run.output
    assert run.workers[0]["ACCELERATE_MIXED_PRECISION"] == "no", fixed_upstream(20)

    result = mpguard("launch", ENVIRONMENT, "--config", path)
    assert result.status == 1 and f"Put it before: --config {path} {ENVIRONMENT}" in result.err, result
    # `mpguard launch --config` and the hook: tests/runtime/launch


def test_s21_multi_cpu_starts_one_process(tmp_path: Path) -> None:
    keys = {"distributed_type": "MULTI_CPU", "num_processes": 2}
    run = launched(tmp_path, config=config(tmp_path, **keys))
    assert run.status == 0 and len(run.workers) == 1, fixed_upstream(21)
    assert worlds(tmp_path, run.workers) == [(0, 1, "NO", "bf16")], fixed_upstream(21)

    path = mp_yaml(tmp_path, **keys)
    run = launched(tmp_path, config=path, program=mpguard_launch)
    assert [(worker["RANK"], worker["WORLD_SIZE"]) for worker in run.workers] == [("0", "2"), ("1", "2")], run.output
    one = in_fork(["--config", path, ENVIRONMENT], cwd=tmp_path)
    assert one.returncode == 1 and "asks for 2 processes, 1 was started" in one.stderr, transcript(one)


def test_s22_multi_gpu_without_a_gpu_starts_processes_without_a_process_group(tmp_path: Path) -> None:
    keys = {"distributed_type": "MULTI_GPU", "num_processes": 2}
    run = launched(tmp_path, config=config(tmp_path, **keys))
    assert run.status == 0 and len(run.workers) == 2, run.output
    assert not any("ACCELERATE_USE_CPU" in worker for worker in run.workers), "S23: ignored with MULTI_GPU too"
    assert worlds(tmp_path, run.workers) == [(0, 1, "NO", "bf16")] * 2, fixed_upstream(22)
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in (0, 1)]
    assert worlds(tmp_path, ranks) == [(0, 1, "NO", "no")] * 2, fixed_upstream(22)  # the variables of torchrun alone

    assert "processes would start without a process group in common" in refused(mp_yaml(tmp_path, **keys))


def test_s23_use_cpu_is_ignored_with_fsdp_and_deepspeed(tmp_path: Path) -> None:
    fsdp = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": "{fsdp_version: 2}"}
    run = launched(tmp_path, config=config(tmp_path, **fsdp))
    assert not any("ACCELERATE_USE_CPU" in worker for worker in run.workers), fixed_upstream(23)
    assert worlds(tmp_path, run.workers) == [(0, 1, "NO", "bf16")] * 2, fixed_upstream(23)
    first = launched(tmp_path, config=config(tmp_path, **{**fsdp, "fsdp_config": "{fsdp_version: 1}"}))
    with pytest.raises(AssertionError, match="no available devices"):
        worlds(tmp_path, first.workers)  # by `sync_module_states`, which the launcher sets for FSDP 1
        pytest.fail(fixed_upstream(23))
    assert "accelerate never applies it here: there is no GPU, and `use_cpu: true`" in refused(
        mp_yaml(tmp_path, **fsdp)
    )

    deepspeed = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": "{zero_stage: 2}"}
    run = launched(tmp_path, config=config(tmp_path, **deepspeed))
    assert not any("ACCELERATE_USE_CPU" in worker for worker in run.workers), fixed_upstream(23)
    variables = {name: value for name, value in run.workers[0].items() if name.startswith("ACCELERATE_")}
    ranks = ranks_in_fork([SHARED / "accelerated.py"], cwd=tmp_path, program=run_python, **variables)
    errors = [rank.stderr for rank in ranks]  # the later rank may report that the other one has ended
    assert all(rank.returncode == 1 for rank in ranks) and "train_batch_size is not equal" in "".join(errors), (
        fixed_upstream(23)
    )
    assert "which accelerate starts on a GPU only" in refused(mp_yaml(tmp_path, **deepspeed))


def test_s26_a_script_whose_last_act_is_a_collective_aborts_at_exit(tmp_path: Path) -> None:
    """With one process, and made likely by the program; normally, with two ranks, it is one run in five."""
    program = PROGRAMS / "last_collective.py"
    for _ in range(4):
        stock = command("python", program, cwd=tmp_path)
        assert "the collectives are left" in stock.stdout, transcript(stock)
        if stock.returncode:
            break
    assert stock.returncode == -signal.SIGABRT and "terminate called" in stock.stderr, fixed_upstream(26)

    for world in ("1", "2"):
        run = command("python", program, "--activate", cwd=tmp_path, WORLD_SIZE=world)
        assert "the collectives are left" in run.stdout and run.returncode == 0, transcript(run)
