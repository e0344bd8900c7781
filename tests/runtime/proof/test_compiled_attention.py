"""Attention in compiled code that no kernel takes whole multiplies in FP32, as in eager code; nothing else may."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import in_fork, proof, run_python, transcript

PROGRAM = """
import torch
from torch import nn
import mpguard
from mpguard.nn import compile as compilation
compilation.BACKEND = "aot_eager"
mpguard.activate(mpguard.recipe("bf16_mixed").replace(compile=COMPILE), proof_json="proof.json")
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        h = ATTENTION
        return x + self.out(h.transpose(1, 2).flatten(2))
m = nn.Sequential(Block(), Block())
o = torch.optim.AdamW(m.parameters())
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16): loss = m(torch.randn(2, 64, 32)).float().pow(2).mean()
    loss.backward(); o.step(); o.zero_grad()
"""

#: No kernel for the CPU has dropout.
DROPOUT = "nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)"
BY_HAND = "((q.float() @ k.float().mT).softmax(-1) @ v.float()).to(q.dtype)"


def rows(folder: Path, attention: str, *, compiled: bool) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the program, and return its status and the rows of its proof."""
    (folder / "t.py").write_text(PROGRAM.replace("COMPILE", str(compiled), 1).replace("ATTENTION", attention))
    ended = in_fork([folder / "t.py"], cwd=folder, program=run_python)
    assert (folder / "proof.json").exists(), transcript(ended)
    return ended.returncode, proof(folder / "proof.json")["rows"]


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_attention_in_parts_is_attention(tmp_path: Path, compiled: bool) -> None:
    status, found = rows(tmp_path, DROPOUT, compiled=compiled)
    assert status == 0 and found["compute"]["found"] == "bf16"
    row = found["attention"]
    assert row["found"].startswith("fp32 (wider than bf16") and row["verdict"] == "not_asked", "nothing was lost"


def test_compiled_products_in_fp32_next_to_attention_are_not(tmp_path: Path) -> None:
    island = f"{DROPOUT} + torch.autocast('cpu', enabled=False)(lambda: {BY_HAND})()"
    status, found = rows(tmp_path, island, compiled=True)
    assert status == 0 and "fp32" in found["compute"]["found"] and "fp32 by the script" in found, found
