"""S30: mixture of experts, which transformers multiplies with an operator that autocast does not cast."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import in_fork, mp_yaml, proof, results, run_python, transcript
from stock import PROGRAMS, fixed_upstream


@pytest.mark.parametrize("compiled", [(), ("compiled",)], ids=["eager", "compiled"])
def test_s30_experts_compute_in_fp32_under_autocast(tmp_path: Path, compiled: tuple[str, ...]) -> None:
    pytest.importorskip("transformers", minversion="5.2", reason="before, experts call torch's operator themselves")
    words = [PROGRAMS / "experts.py", *compiled]
    stock = in_fork(words, cwd=tmp_path, program=run_python)
    assert stock.returncode == 0, transcript(stock)
    assert results(stock)[0]["experts"] == ["torch.float32"], fixed_upstream(30)

    run = in_fork(["--config", mp_yaml(tmp_path), "--proof-json", "proof.json", *words], cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    assert results(run)[0]["experts"] == ["torch.bfloat16"]
    assert proof(tmp_path / "proof.json")["rows"]["compute"]["found"] == "bf16"
    assert results(run)[0]["loss"] == pytest.approx(results(stock)[0]["loss"], rel=0.02)
