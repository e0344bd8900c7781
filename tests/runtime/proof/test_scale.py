"""What one of 64 to 512 ranks has proven about itself: dtypes of shards, gradients, reductions and states.

A fake process group moves no data, so that neither values nor the agreement of ranks can be tested so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import in_fork, proof, run_python, transcript

PROGRAM = Path(__file__).parents[2] / "programs/fake_ranks.py"


@pytest.mark.parametrize(
    ("kind", "ranks", "reduction"),
    [
        ("fsdp2", 512, "fp32 (the collective)"),
        ("hsdp", 64, "fp32 over shard, fp32 over replicate (the collective)"),
        ("hsdp", 512, "fp32 over shard, fp32 over replicate (the collective)"),
        ("tp", 512, "fp32 over dp (the collective)"),
    ],
)
def test_a_rank_of_many_is_proven(tmp_path: Path, kind: str, ranks: int, reduction: str) -> None:
    ended = in_fork([PROGRAM, kind, ranks], cwd=tmp_path, program=run_python)
    assert ended.returncode == 0, transcript(ended)
    rows = proof(tmp_path / "proof.json")["rows"]
    assert rows["processes"]["found"] == str(ranks)
    assert rows["parameters"]["found"].startswith("fp32 (sharded)") and rows["compute"]["found"] == "bf16"
    assert (rows["gradients"]["found"], rows["reduction"]["found"]) == ("fp32", reduction)
    assert rows["optimizer"]["found"] == "AdamW, weights fp32, states fp32"


def test_a_wrong_rank_of_many_is_refused(tmp_path: Path) -> None:
    ended = in_fork([PROGRAM, "hsdp", 512, "wrong"], cwd=tmp_path, program=run_python)
    assert ended.returncode == 1 and proof(tmp_path / "proof.json")["rows"]["parameters"]["found"].startswith("bf16")
