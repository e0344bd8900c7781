"""S38: compiled models of transformers, whose attention gets a mask where it gets `is_causal` in eager code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import in_fork, proof, results, run_python, transcript
from stock import PROGRAMS, fixed_upstream


def test_s38_compiled_attention_gets_a_mask(tmp_path: Path) -> None:
    program = PROGRAMS / "attention.py"
    stock = in_fork([program], cwd=tmp_path, program=run_python)
    assert stock.returncode == 0, transcript(stock)
    assert results(stock)[0]["found"] == ["mask", "mask"], fixed_upstream(38)

    for words, policy, found, kernel in (
        (("in_place",), {}, "is_causal", "is_causal"),
        ((), {}, "is_causal", "is_causal"),
        ((), {"attention_fix": False}, "mask", "a mask"),
    ):
        run = in_fork(["--proof-json", "p.json", program, *words], cwd=tmp_path, MPGUARD_POLICY=json.dumps(policy))
        assert run.returncode == 0, transcript(run)
        assert results(run)[0]["found"] == [found, found], transcript(run)
        assert results(run)[0]["losses"] == pytest.approx(results(stock)[0]["losses"], rel=1e-5)
        assert proof(tmp_path / "p.json")["rows"]["attention mask"]["found"] == f"kernel takes {kernel}"
        assert f"attention mask kernel takes {kernel}" in run.stderr, "a row of the table"
        assert "is_causal" not in run.stderr.splitlines()[0], "the header does not claim what no graph has shown yet"
