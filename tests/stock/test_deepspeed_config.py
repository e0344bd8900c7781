"""S8, S9, S18, S29: how DeepSpeed reads its config, on the CPU; all in one process, with mpguard and without."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import Program, free_port, in_fork, mp_yaml, run_module, run_python, transcript
from stock import ENVIRONMENT, PROGRAMS, fixed_upstream, linted, mpguard
from stock import config as stock_config

ZERO = {"zero_optimization": {"stage": 1}}
ON = {"enabled": True}

#: The cases: a config, and accelerate's `mixed_precision` if accelerate prepares the model.
ASKED: dict[str, dict[str, Any]] = {
    "auto": {"config": {**ZERO, "bf16": {"enabled": "auto"}}, "mode": "no"},
    "auto, without accelerate": {"config": {**ZERO, "bf16": {"enabled": "auto"}}},
    "auto, control": {"config": {**ZERO, "bf16": {"enabled": "auto"}}, "mode": "bf16"},
    "false": {"config": {**ZERO, "bf16": {"enabled": False}}, "mode": "bf16"},
    "fp8": {"config": {**ZERO, "fp8": ON}},
    "bfloat_16": {"config": {**ZERO, "bfloat_16": ON}},
    "two": {"config": {**ZERO, "bf16": ON, "torch_autocast": {**ON, "colour": "red"}, "data_types": {"colour": "red"}}},
    "amp": {"config": {**ZERO, "amp": {"enabled": False}}},
}

Run = tuple[dict[str, str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Program], Run]:
    """Run all cases, once per program; return the dtype or the error of each case, by name, and the run."""
    made: dict[Program, Run] = {}

    def run(program: Program) -> Run:
        if program not in made:
            folder = tmp_path_factory.mktemp("deepspeed")
            words = [PROGRAMS / "deepspeed_precision.py", *map(json.dumps, ASKED.values())]
            if program is run_module:
                keys = {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: 1}"}
                words = ["--config", mp_yaml(folder, **keys), *words]
            ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            done = in_fork(words, cwd=folder, program=program, **ranks, **address)
            lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            assert len(lines) == len(ASKED), transcript(done)
            made[program] = dict(zip(ASKED, lines, strict=True)), done
        return made[program]

    return run


def ds_json(folder: Path, name: str) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **ASKED[name]["config"]}, indent=1))
    return path


def refused(folder: Path, second: Path) -> str:
    """Return the refusal of `mpguard launch` for a YAML that names this DeepSpeed file."""
    keys = {"distributed_type": "DEEPSPEED", "deepspeed_config": f"{{deepspeed_config_file: {second}}}"}
    result = mpguard("launch", "--config", mp_yaml(folder, mixed_precision=None, **keys), ENVIRONMENT)
    assert result.status == 1, result
    return result.err


def test_s08_auto_and_no_precision_elsewhere_is_fp32(taken: Callable[[Program], Run], tmp_path: Path) -> None:
    found, run = taken(run_python)
    assert found["auto, control"] == "bfloat16", transcript(run)
    assert (found["auto"], found["auto, without accelerate"]) == ("float32", "float32"), fixed_upstream(8)

    path = ds_json(tmp_path, "auto")
    keys = {"mixed_precision": "", "distributed_type": "DEEPSPEED"}
    stock_config(tmp_path, **keys, deepspeed_config=f"{{deepspeed_config_file: {path.name}}}")
    (tmp_path / "train.py").write_text("from accelerate import Accelerator\n\naccelerator = Accelerator()\n")
    assert ("MPG824", 7) in linted(tmp_path)
    assert "`bf16.enabled` is auto, which here means false" in refused(tmp_path, path)
    found, run = taken(run_module)
    assert (found["auto"], found["auto, without accelerate"]) == ("bfloat16", "bfloat16"), transcript(run)


def test_s09_false_with_mixed_precision_bf16_is_fp32(taken: Callable[[Program], Run], tmp_path: Path) -> None:
    found, run = taken(run_python)
    assert found["false"] == "float32", fixed_upstream(9)

    assert "`bf16.enabled` is false; the policy `bf16_mixed` needs true" in refused(
        tmp_path, ds_json(tmp_path, "false")
    )
    found, run = taken(run_module)
    assert found["false"] == "bfloat16", transcript(run)
    assert "deepspeed.initialize: bf16.enabled: false -> true" in run.stderr


def test_s18_unknown_sections_and_a_second_precision_are_accepted(
    taken: Callable[[Program], Run], tmp_path: Path
) -> None:
    found, _ = taken(run_python)
    assert (found["fp8"], found["bfloat_16"], found["two"]) == ("float32", "float32", "bfloat16"), fixed_upstream(18)

    for name, code in (("fp8", "MPG823"), ("bfloat_16", "MPG823"), ("two", "MPG823"), ("two", "MPG821")):
        path = ds_json(tmp_path, name)
        assert code in {each for each, _ in linted(path)}, name
        assert mpguard("apply", "bf16_mixed", path).status == 0
        data = json.loads(path.read_text())
        assert data["bf16"] == ON and not {"fp8", "torch_autocast"} & data.keys()
    found, run = taken(run_module)
    assert (found["fp8"], found["bfloat_16"], found["two"]) == ("bfloat16",) * 3, transcript(run)
    assert "fp8: {enabled: true} -> (removed)" in run.stderr
    assert "torch_autocast: {enabled: true, colour: red} -> (removed)" in run.stderr


def test_s29_a_disabled_amp_section_stops_deepspeed(taken: Callable[[Program], Run], tmp_path: Path) -> None:
    found, _ = taken(run_python)
    assert found["amp"].startswith("DeepSpeedConfigError: NVIDIA Apex AMP integration has been removed"), (
        fixed_upstream(29)
    )

    assert "MPG826" in {code for code, _ in linted(ds_json(tmp_path, "amp"))}
    found, run = taken(run_module)
    assert found["amp"] == "bfloat16", transcript(run)
    assert "amp: {enabled: false} -> (removed)" in run.stderr
