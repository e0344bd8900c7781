"""`master_weights: optimizer` with the real engines: injected when the optimizer is created, and proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import in_fork, mp_yaml, proof, ranks_in_fork, results, transcript

PROGRAM = PROGRAMS / "master_weights.py"
FIELD = "mpguard_overrides: {master_weights: optimizer}"

#: Words of the program -> the config.
ENGINES: dict[str, dict[str, str]] = {
    "plain --resume": {},
    "plain --passes 4": {},
    "accelerate": {},
    "trainer": {},
    "ddp": {"distributed_type": "MULTI_CPU"},
    "ddp --last": {"distributed_type": "MULTI_CPU"},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 1}"},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": "{fsdp_version: 2}"},
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": "{zero_stage: 2}"},
}


def run(folder: Path, words: str, field: str = FIELD) -> tuple[Any, dict[str, Any]]:
    keys = ENGINES.get(words, {})
    processes = 2 if "distributed_type" in keys else 1
    own = f"{{mpguard_recipe: bf16_mixed, {field}}}"
    config = mp_yaml(folder, num_processes=processes, fp8_config=own, **keys)
    arguments = ["--config", config, "--proof-json", folder / "proof.json", PROGRAM, *words.split()]
    if processes == 1:
        ended = in_fork(arguments, cwd=folder)
    else:
        ended, other = ranks_in_fork(arguments, cwd=folder, processes=processes)
        if "ddp" in words:
            assert results(ended)[0]["sums"] == results(other)[0]["sums"], "ranks have the same masters"
    return ended, dict(proof(folder / "proof.json")) if (folder / "proof.json").exists() else {}


@pytest.mark.parametrize("words", ENGINES)
def test_every_engine_has_fp32_masters_and_is_in_force(tmp_path: Path, words: str) -> None:
    ended, made = run(tmp_path, words)
    assert ended.returncode == 0, transcript(ended)
    found = results(ended)[0]
    assert made["verdict"] == "in force", transcript(ended)
    rows = made["rows"]
    assert rows["optimizer"]["found"].endswith("weights fp32, states fp32"), rows
    sharded = words.startswith(("fsdp", "zero"))
    held = "fp32" if words.startswith("fsdp") else "bf16"
    assert rows["parameters"]["found"].startswith(held) and rows["parameters"]["asked"] == held
    assert rows["gradients"]["found"] == ("fp32" if sharded or "passes" in words else "bf16"), rows
    if "passes" in words:
        assert (rows["accumulation"]["found"], rows["accumulation"]["ok"]) == ("fp32, 3 passes", True)
    if words.startswith("ddp"):
        assert rows["reduction"]["found"].startswith("fp32"), rows
    assert found["parameters"] == ["bfloat16" if held == "bf16" else "float32"]
    assert found["losses"][-1] < found["losses"][0]
