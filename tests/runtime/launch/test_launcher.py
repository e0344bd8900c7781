"""`mpguard launch`, `mpguard.run` and refusals, with accelerate's real launcher on the CPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import stock
from accelerate.commands.launch import launch_command_parser
from limits import seconds
from paths import PROGRAMS
from processes import (
    free_port,
    in_fork,
    launch,
    launch_in_forks,
    mp_yaml,
    newer,
    on_ranks,
    proof,
    ranks_in_fork,
    results,
    run_python,
    started,
    transcript,
)

from mpguard.cli import main
from mpguard.core.errors import NotInForce
from mpguard.core.tested import TESTED
from mpguard.runtime.launch import build_locks, launcher
from mpguard.runtime.plan import Plan, refuse_config_after_script

SCRIPT = PROGRAMS / "accelerated.py"


def test_one_process(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path, fp8_config="{mpguard_recipe: bf16_mixed, mpguard_watch: off}")
    own = ("--proof-json", "proof.json", "--watch", "full", "--watch-json", "run.jsonl")  # the flag has priority
    run = launch("--config", config, *own, SCRIPT, "a b", "--lr", "0.01", cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    (found,) = results(run)
    assert found["arguments"] == ["a b", "--lr", "0.01"] and found["name"] == "__main__"
    assert (found["compute"], found["master"], found["mode"]) == ("torch.bfloat16", "torch.float32", "bf16")
    assert json.loads(found["policy"]) == {"name": "bf16_mixed", "bf16": True}
    assert run.stdout.count("\n") == 1, "stdout is the script's"
    assert "recipe bf16_mixed" in run.stderr and "proven in force" in run.stderr
    assert proof(tmp_path / "proof.json")["verdict"] == "in force"
    head, *steps = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert (head["level"], head["version"]) == ("full", 1)
    assert [(each["event"], each["step"]) for each in steps] == [("step", step) for step in range(1, 9)]
    assert all(each["loss"] > 0 for each in steps)


def test_two_processes_that_stock_accelerate_would_not_start(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    run = launch("--config", config, "--proof-json", "proof.json", SCRIPT, cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    assert [(found["rank"], found["world"], found["compute"]) for found in results(run)] == [
        (0, 2, "torch.bfloat16"),
        (1, 2, "torch.bfloat16"),
    ]
    made = proof(tmp_path / "proof.json")
    assert made["rows"]["engine"]["found"] == "ddp" and made["rows"]["processes"]["found"] == "2"
    assert made["observed"]["reductions"].keys() == {"fp32"}


def test_a_mode_in_upper_case_is_passed_on_in_lower_case(tmp_path: Path) -> None:
    """accelerate reads `BF16` in a config, but not as a flag."""
    config = mp_yaml(tmp_path, mixed_precision="BF16")
    words = ["--config", str(config), "--mixed_precision", "fp16", str(SCRIPT)]
    prepared = launcher.prepare(words, launch_command_parser)
    assert prepared is not None
    assert launch_command_parser().parse_args(prepared.argv).mixed_precision == "bf16"


def test_the_status_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "seven.py").write_text("import sys; sys.exit(7)\n")
    (tmp_path / "boom.py").write_text("raise RuntimeError('boom')\n")
    config = mp_yaml(tmp_path)
    assert in_fork(["--config", config, "seven.py"], cwd=tmp_path).returncode == 7
    run = in_fork(["--config", config, "boom.py"], cwd=tmp_path)
    assert run.returncode == 1 and "mpguard:" not in run.stderr
    assert "boom.py" in run.stderr and "mpguard/r" not in run.stderr, "a traceback without our frames"


def test_the_status_is_that_of_the_first_rank_that_failed(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    run = launch("--config", config, SCRIPT, "--exit", 1, 7, cwd=tmp_path)
    assert run.returncode == 7 and "not in force" not in run.stderr, transcript(run)


def test_a_rank_whose_collective_fails_names_the_one_that_ended(tmp_path: Path) -> None:
    """Without torchelastic, which may end rank 0 before its collective fails."""
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    run = on_ranks("-m", "mpguard.run", "--config", config, SCRIPT, "--exit", 1, 7, cwd=tmp_path)
    assert "ended because of another one: rank 1 (" in run.stderr, transcript(run)
    assert "ended with SystemExit: 7" in run.stderr


def test_the_status_is_that_of_the_killed_rank_not_of_ranks_ended_by_torchelastic() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def launch_command(_options: object) -> None:
        ended, killed = (
            ProcessFailure(local_rank=rank, pid=1, exitcode=-number, error_file="")
            for rank, number in ((0, signal.SIGTERM), (1, signal.SIGKILL))
        )
        raise ChildFailedError("t.py", {0: ended, 1: killed})

    assert launcher._launch(launch_command, argparse.Namespace()) == 128 + signal.SIGKILL


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return (Path("/proc") / str(process) / "stat").read_text().split(") ")[1].startswith("Z")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all_workers(tmp_path: Path, processes: int, number: signal.Signals) -> None:
    kind = "MULTI_CPU" if processes > 1 else "'NO'"
    config = mp_yaml(tmp_path, distributed_type=kind, num_processes=processes)
    with started("mpguard", "launch", "--config", config, SCRIPT, "--sleep", 60, cwd=tmp_path) as launcher:
        assert launcher.stdout is not None
        workers = [int(launcher.stdout.readline().split()[1]) for _ in range(processes)]
        launcher.send_signal(number)
        assert launcher.wait(seconds(40)) == 128 + number
        deadline = time.monotonic() + seconds(10)
        while not all(map(gone, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(map(gone, workers))


STUBBORN = """
import os, signal, sys, time
import torch
from torch.utils.file_baton import FileBaton
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ.get("RANK", "0") == "0":
    os.makedirs("build/own", exist_ok=True)
    baton = FileBaton("build/own/lock")
    assert baton.try_acquire()
print("ready", os.getpid(), flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_signal_ends_workers_that_ignore_the_first(tmp_path: Path, processes: int) -> None:
    """Without a traceback; and the lock of a build that is killed with them is removed."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    kind = "MULTI_CPU" if processes > 1 else "'NO'"
    config = mp_yaml(tmp_path, distributed_type=kind, num_processes=processes)
    words = ("launch", "--config", config, "stubborn.py")
    with (
        (tmp_path / "errors").open("w") as errors,
        started("mpguard", *words, cwd=tmp_path, errors=errors, TORCH_EXTENSIONS_DIR="build") as launcher,
    ):
        assert launcher.stdout is not None
        workers = [int(launcher.stdout.readline().split()[1]) for _ in range(processes)]
        assert (tmp_path / "build" / "own" / "lock").exists()
        for _ in range(1 + processes):  # torchelastic takes the second one for itself
            launcher.send_signal(signal.SIGTERM)
            time.sleep(1)
        assert launcher.wait(seconds(40)) == 128 + signal.SIGTERM, (tmp_path / "errors").read_text()
        assert all(map(gone, workers))
    assert "Traceback" not in (tmp_path / "errors").read_text()
    # Builds of torch 2.14 take another lock, which ends with its process.
    assert (tmp_path / "build" / "own" / "lock").exists() == build_locks.held_by_the_kernel()


def test_another_precision_in_the_script_is_overridden_and_logged(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path)
    run = in_fork(["--config", config, SCRIPT, "--mixed-precision", "no"], cwd=tmp_path)
    assert run.returncode == 0 and results(run)[0]["compute"] == "torch.bfloat16", transcript(run)
    assert "Accelerator: mixed_precision: no -> bf16" in run.stderr


def test_another_precision_in_the_file_is_overridden_and_printed(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path, mixed_precision="'no'  # old")
    before = config.read_text()
    run = launch_in_forks("--config", config, SCRIPT, cwd=tmp_path)
    assert run.returncode == 0 and results(run)[0]["mode"] == "bf16", transcript(run)
    assert "mixed_precision  no -> bf16" in run.stderr
    assert config.read_text() == before, "the file is the user's"


def test_accelerate_computes_fp16_on_the_cpu_with_autocast_and_a_scaler(tmp_path: Path) -> None:
    """By itself it enables neither there, and computes in FP32."""
    fp8 = "{mpguard_recipe: fp16_mixed, mpguard_overrides: {initial_loss_scale: 1024.0}}"
    config = mp_yaml(tmp_path, mixed_precision="fp16", fp8_config=fp8)
    run = in_fork(["--config", config, "--proof-json", "proof.json", SCRIPT, "--scaler"], cwd=tmp_path)
    assert run.returncode == 0 and results(run)[0]["compute"] == "torch.float16", transcript(run)
    rows = proof(tmp_path / "proof.json")["rows"]
    assert rows["scaler"]["ok"] and "GradScaler, scale 1024" in rows["scaler"]["found"]
    assert "GradScalerKwargs.init_scale: 8.0 -> 1024.0" in run.stderr


@pytest.mark.parametrize(("words", "scale"), [(("--scaler",), "8"), ((), "65536")])
def test_the_loss_scale_begins_where_the_script_has_it(tmp_path: Path, words: tuple[str, ...], scale: str) -> None:
    """The recipe's own value is Megatron's, for long runs: it is only the largest one."""
    config = mp_yaml(tmp_path, mixed_precision="fp16", recipe="fp16_mixed")
    run = in_fork(["--config", config, "--proof-json", "proof.json", SCRIPT, *words], cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    assert f"GradScaler, scale {scale}," in proof(tmp_path / "proof.json")["rows"]["scaler"]["found"] + ","
    assert "init_scale" not in run.stderr


@pytest.mark.parametrize("words", [("--one-layer",), ()])
def test_compute_is_observed_before_accelerates_casts_and_in_compiled_models(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    config = mp_yaml(tmp_path)
    variables = {} if words else {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}
    run = in_fork(["--config", config, "--proof-json", "proof.json", SCRIPT, *words], cwd=tmp_path, **variables)
    assert run.returncode == 0, transcript(run)
    compute = proof(tmp_path / "proof.json")["rows"]["compute"]
    assert (compute["found"], compute["ok"]) == ("bf16", True)


# -- mpguard.run and mpguard.auto ----------------------------------------------------------------


def test_run_under_the_stock_launcher(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path)
    words = ("--config_file", config, "-m", "mpguard.run", "--config", config, SCRIPT, "x")
    run = in_fork(words, cwd=tmp_path, program=stock.launcher)
    assert run.returncode == 0 and results(run)[0]["arguments"] == ["x"], transcript(run)
    assert run.stderr.count("recipe bf16_mixed") == 2, "header and proof name it"


def test_run_refuses_one_process_if_the_config_has_two(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    words = ("--config_file", config, "-m", "mpguard.run", "--config", config, SCRIPT)
    run = in_fork(words, cwd=tmp_path, program=stock.launcher)
    assert run.returncode == 1 and results(run) == [], transcript(run)
    assert "mpguard: not in force: " in run.stderr and "asks for 2 processes, 1 was started" in run.stderr


def test_run_without_a_policy_does_not_start(tmp_path: Path) -> None:
    run = in_fork([SCRIPT], cwd=tmp_path)
    assert run.returncode == 2 and "mpguard: no policy is in force" in run.stderr, transcript(run)


def test_run_takes_the_policy_from_the_settings(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.mpguard]\nrecipe = "bf16_mixed"\n')
    run = in_fork([SCRIPT], cwd=tmp_path)
    assert run.returncode == 0 and results(run)[0]["compute"] == "torch.bfloat16", transcript(run)


def test_run_refuses_a_config_among_the_arguments_of_the_script(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path)
    run = in_fork([SCRIPT, "--config", config], cwd=tmp_path, MPGUARD_POLICY='{"bf16": true}')
    assert run.returncode == 1 and "comes after" in run.stderr and "Put it before" in run.stderr, transcript(run)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("distributed_type: FSDP\n", True),
        ("compute_environment: LOCAL_MACHINE\n", True),
        ("mixed_precision: bf16\nnum_processes: 2\ndebug: true\n", False),  # may be the script's own config
        ("model: {layers: 2}\ndeepspeed_config: {stage: 2}\n", False),
        ("distributed_type: [\n", False),
    ],
)
def test_which_arguments_of_the_script_are_refused_as_configs(tmp_path: Path, text: str, refused: bool) -> None:
    """Only files that certainly are accelerate configs: a run is not refused for the config of its own script."""
    (tmp_path / "config.yaml").write_text(text)
    for words in (["--config", str(tmp_path / "config.yaml")], [f"--config={tmp_path / 'config.yaml'}"]):
        with pytest.raises(NotInForce, match="Put it before") if refused else contextlib.nullcontext():
            refuse_config_after_script("t.py", words)


#: What a package runs as its `__main__`. What it leaves behind is destroyed when Python destroys modules, not earlier,
#: when a process group of gloo could wait for ever. (A fork ends before that.)
PACKAGE = """
import sys
print(__name__, __package__, __spec__.name, sys.argv)
class Left:
    def __del__(self): print("destroyed")
left = Left()
if sys.argv[1:] == ["exit"]: sys.exit()
if sys.argv[1:] == ["import"]: import nowhere.at_all
"""


@pytest.mark.parametrize(("word", "status"), [("end", 0), ("exit", 0), ("import", 1)])
def test_run_of_a_module(tmp_path: Path, word: str, status: int) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("")
    (tmp_path / "trainer" / "__main__.py").write_text(PACKAGE)
    words = ("-m", "mpguard.run", "--config", mp_yaml(tmp_path), "-m", "trainer", word)
    run = in_fork(words, cwd=tmp_path, program=run_python)
    argv = [str(tmp_path / "trainer" / "__main__.py"), word]
    assert (run.returncode, run.stdout) == (status, f"__main__ trainer trainer.__main__ {argv}\n"), transcript(run)
    assert ("No module named 'nowhere'" in run.stderr) == (word == "import"), transcript(run)
    assert "worker.py" not in run.stderr and "there is no such module" not in run.stderr, transcript(run)


def test_auto_under_torchrun_names_every_rank(tmp_path: Path) -> None:
    """The processes have nothing in common: the script creates no process group."""
    script = PROGRAMS / "loop.py"
    variables = {"MPGUARD_POLICY": '{"name": "mine", "bf16": true}'}
    run = on_ranks(script, "plain", "--auto", cwd=tmp_path, **variables)
    assert run.returncode == 1 and results(run) == [], transcript(run)
    assert "2 processes were started without a process group in common" in run.stderr
    assert ["NotInForce" in (tmp_path / f"raised.{rank}").read_text() for rank in (0, 1)] == [True, True]


def test_auto_without_a_policy_is_refused(tmp_path: Path) -> None:
    run = in_fork(["-c", "import mpguard.auto"], cwd=tmp_path, program=run_python)
    assert run.returncode == 1 and "no policy is in force" in run.stderr, transcript(run)


# -- refused before anything starts --------------------------------------------------------------


def refused(folder: Path, *words: object, capsys: pytest.CaptureFixture[str], script: Path = SCRIPT) -> tuple[int, str]:
    """Return status and stderr of `mpguard launch` in this process; it starts no worker."""
    status = main(["launch", *map(str, words), str(script)])
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    return status, printed.err


DEEPSPEED = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"distributed_type": "FSDP", "num_processes": 2}, "FSDP (line 2), but accelerate never applies it here"),
        ({"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2}"}, "`use_cpu: true` (line 6) is ignored"),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2}, "start without a process group in common"),
        ({"distributed_type": "DEEPSPEED", "num_processes": 2}, "which accelerate starts on a GPU only"),
        ({"num_processes": 2}, "`distributed_type: NO` (line 2), which starts one process"),
        ({"deepspeed_config": "{mixed_precision: fp16}"}, "silently overrides the top-level mixed_precision"),
        ({"fsdp_config": "{mixed_precision_policy: fp16}"}, "accelerate reads no such key"),
        ({"recipe": "bf16_with_fp8_current_scaling_mixed", "mixed_precision": "fp8"}, "needs compute capability"),
    ],
)  # fmt: skip
def test_a_run_that_would_silently_degrade_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, object], expected: str
) -> None:
    config = mp_yaml(tmp_path, **keys)  # type: ignore[arg-type]
    status, message = refused(tmp_path, "--config", config, "--proof-json", tmp_path / "proof.json", capsys=capsys)
    assert status == 1 and message.startswith("mpguard: not in force: ") and expected in message, message
    assert proof(tmp_path / "proof.json")["verdict"] == "not in force"


@pytest.mark.parametrize(
    ("enabled", "says"),
    [
        ('"auto"', "auto, which here means false; the policy"),
        ("false", "false; the policy"),
        ('"true"', "true in quotes, a string, which the Trainer and DeepSpeed do not take for a boolean; the policy"),
    ],
)
def test_a_deepspeed_file_that_means_fp32_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], enabled: str, says: str
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED)[:-1] + f',\n "bf16": {{"enabled": {enabled}}}}}\n')
    section = "{deepspeed_config_file: " + str(tmp_path / "ds.json") + "}"
    config = mp_yaml(tmp_path, distributed_type="DEEPSPEED", mixed_precision=None, deepspeed_config=section)
    status, message = refused(tmp_path, "--config", config, capsys=capsys)
    assert status == 1 and f"ds.json:2: `bf16.enabled` is {says}" in message, message
    assert "mpguard apply bf16_mixed" in message, message


def overriding(fields: str) -> dict[str, object]:
    return {"fp8_config": f"{{mpguard_recipe: bf16_mixed, mpguard_overrides: {{{fields}}}}}"}


@pytest.mark.parametrize(
    ("keys", "text", "expected"),
    [
        ({"recipe": "bf16_mxied"}, "", "did you mean `bf16_mixed`"),
        (overriding("grad_reduce_fp32: true"), "", "grad_reduce_in_fp32"),
        (overriding("hysteresis: 3"), "", "only FP16's range"),
        ({"recipe": None}, "", "names no recipe"),
        ({}, "a: [", "mp.yaml:"),
        ({}, "a: !!python/object/apply:os.system ['touch hacked']\n", "mp.yaml:"),
        ({}, "colour: red\n", "`colour`: accelerate has no such key. Remove it"),
        ({}, "mixed_precission: bf16\n", "accelerate has no such key; did you mean `mixed_precision`"),
        (overriding("pipeline_dtype: fp32"), "", "cannot put into force"),
        ({"distributed_type": "FDSP"}, "", "mp.yaml:2: `distributed_type`: accelerate has no `FDSP`; did you mean"),
        ({"num_processes": "two"}, "", "mp.yaml:5: `num_processes`: is two; a number from 1 is needed"),
        ({"num_processes": -1, "distributed_type": "MULTI_CPU"}, "", "a number from 1 is needed"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "", 'mpguard.activate("RECIPE") in the script'),
    ],
)  # fmt: skip
def test_a_run_that_cannot_start_prints_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, object], text: str, expected: str
) -> None:
    status, message = refused(tmp_path, "--config", mp_yaml(tmp_path, text=text, **keys), capsys=capsys)  # type: ignore[arg-type]
    assert status == 2 and "mpguard: " in message and expected in message, message
    assert not Path("hacked").exists()


def test_another_file_than_a_config_cannot_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "axolotl.yaml").write_text("base_model: x\nbf16: auto\n")
    status, message = refused(tmp_path, "--config", tmp_path / "axolotl.yaml", capsys=capsys)
    assert status == 2 and "is not an accelerate config; its keys are `base_model`, `bf16`" in message, message
    assert main(["launch", "--config", str(mp_yaml(tmp_path))]) == 2
    assert "no script is given; the command is mpguard launch --config mp.yaml SCRIPT" in capsys.readouterr().err


def test_a_refusal_names_the_command_line_if_the_value_is_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, message = refused(tmp_path, "--config", mp_yaml(tmp_path), "--num_processes", 2, capsys=capsys)
    assert status == 1 and "the command line asks for 2 processes with `distributed_type: NO` (line 2)" in message, (
        message
    )


def test_an_unquoted_no_is_a_distributed_type(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path, distributed_type="NO")
    prepared = launcher.prepare(["--config", str(config), str(SCRIPT)], launch_command_parser)
    assert prepared is not None and prepared.plan.strategy == "single" == Plan.from_config(config).strategy


def test_a_missing_file_and_no_config_cannot_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(tmp_path, "--config", tmp_path / "none.yaml", capsys=capsys)[0] == 2
    assert refused(tmp_path, capsys=capsys)[0] == 2
    assert refused(tmp_path, "--config", mp_yaml(tmp_path), "--num_processs", "2", capsys=capsys)[0] == 2


def test_a_config_after_the_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = mp_yaml(tmp_path)
    for words in ([f"--config={config}"], ["--config", str(config)]):
        assert main(["launch", str(SCRIPT), *words]) == 1
        assert f"Put it before: --config {config} {SCRIPT}" in capsys.readouterr().err


def test_flags_override_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, message = refused(tmp_path, "--config", mp_yaml(tmp_path), "--use_fsdp", capsys=capsys)
    assert status == 1 and "asks for FSDP" in message


def test_enforce_warn_starts_what_would_be_refused(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path, deepspeed_config="{mixed_precision: fp16}")
    run = launch_in_forks("--enforce", "warn", "--config", config, SCRIPT, cwd=tmp_path)
    assert run.returncode == 0 and "continuing: enforce is warn" in run.stderr, transcript(run)
    assert results(run)[0]["mode"] == "bf16", "and the policy is put in all the same"


# -- engines that accelerate asks for and never applies ------------------------------------------


@pytest.mark.parametrize(
    ("keys", "variables", "expected"),
    [
        (
            {"distributed_type": "FSDP"},
            {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"},
            "engine: ddp; asked: fsdp1",
        ),
        ({"distributed_type": "MULTI_GPU"}, {}, "Each of 2 processes may train a model of its own"),
    ],
)
def test_torchrun_that_becomes_something_else_is_not_in_force(
    tmp_path: Path, keys: dict[str, str], variables: dict[str, str], expected: str
) -> None:
    config = mp_yaml(tmp_path, num_processes=2, main_process_port=free_port(), **keys)
    run = on_ranks("-m", "mpguard.run", "--config", config, SCRIPT, cwd=tmp_path, **variables)
    assert run.returncode == 1 and expected in run.stderr and results(run) == [], transcript(run)
    assert "mpguard: not " in run.stderr  # the data is the same on both ranks, so the gradients do not differ


def test_a_script_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, message = refused(tmp_path, "--config", mp_yaml(tmp_path), script=tmp_path / "nope.py", capsys=capsys)
    assert status == 2 and "nope.py: there is no such file" in message and "recipe" not in message, message


def test_torchrun_uses_the_cpu_where_the_config_says_so(tmp_path: Path) -> None:
    config = mp_yaml(tmp_path, distributed_type="MULTI_CPU", num_processes=2)
    run = on_ranks("-m", "mpguard.run", "--config", config, PROGRAMS / "accelerated.py", cwd=tmp_path)
    assert run.returncode == 0 and "proven in force on all 2 ranks" in run.stderr, transcript(run)


def test_rank_0_prints_a_line_for_a_library_that_was_not_tested(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.mpguard]\nrecipe = "bf16_mixed"\n')
    (tmp_path / "t.py").touch()
    code = f"import sys; sys.path.insert(0, {newer('transformers', tmp_path)!r}); from mpguard import run"
    first, second = ranks_in_fork(
        ["-c", f"{code}; sys.exit(run.main(['--enforce=warn', 't.py']))"], cwd=tmp_path, program=run_python
    )
    line = f"mpguard: transformers 99.0: newer than tested ({TESTED['transformers']}); patches that apply: "
    assert first.stderr.count(line) == 1 and "recipe bf16_mixed" in first.stderr, transcript(first)
    assert line not in second.stderr and "recipe" not in second.stderr, transcript(second)


@pytest.mark.parametrize(("others", "shown"), [("", False), ("\t`--num_processes` was set to a value of `8`\n", True)])
def test_accelerates_notice_of_cpu_threads_alone_is_left_out(others: str, shown: bool) -> None:
    text = (
        f"The following values were not passed:\n{others}\t`--num_cpu_threads_per_process` was set to `2` to improve\n"
    )
    record = logging.LogRecord("accelerate.commands.launch", logging.WARNING, "launch.py", 1, text, (), None)
    assert launcher._is_of_interest(record) is shown
    record.msg = "another message"
    assert launcher._is_of_interest(record)
