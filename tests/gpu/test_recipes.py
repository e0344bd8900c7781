"""Recipes by name train with an ordinary optimizer, and say what they go without. Needs a Hopper GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import in_fork, proof, transcript

torch = pytest.importorskip("torch", reason="the real library runs here")
pytest.importorskip("transformer_engine", reason="its FusedAdam keeps masters")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PROGRAM = """
import sys
import torch
from torch import nn
import mpguard

mpguard.activate(sys.argv[1], proof_json="proof.json")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 10, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        if sys.argv[3] == "conv":
            return self.head(x.view(-1, 3, 8, 8))
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


net = Net().cuda()
if sys.argv[3] == "conv":
    net.blocks, net.out = None, None
if sys.argv[2] == "FusedAdam":
    from transformer_engine.pytorch.optimizers import FusedAdam

    optimizer = FusedAdam(net.parameters(), lr=1e-3, master_weights=True)
elif sys.argv[2] == "FusedAdam without masters":
    from transformer_engine.pytorch.optimizers import FusedAdam

    optimizer = FusedAdam(net.parameters(), lr=1e-3)
else:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=sys.argv[2] == "fused")
x = torch.randn(16, 192 if sys.argv[3] == "conv" else 64, device="cuda")
for step in range(5):
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert loss.isfinite()
"""

RECIPES = (
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nanov2_bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "hopper_bf16_with_fp8_mixed",
    "bf16_with_fp8_rowwise_mixed",
)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("optimizer", ["AdamW", "fused", "FusedAdam", "FusedAdam without masters"])
def test_a_recipe_trains_as_it_comes(recipe: str, optimizer: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    run = in_fork([tmp_path / "train.py", recipe, optimizer, "linear"], cwd=tmp_path, MPGUARD_POLICY='{"bf16": true}')
    assert run.returncode == 0, transcript(run)
    facts = proof(tmp_path / "proof.json")
    wished = facts["policy"].get("fp8_param") == "auto"
    left_out, kept = facts["observed"]["left_out"], sum(facts["observed"]["fp8"]["kept"].values())
    assert facts["verdict"] == "in force"
    assert (kept > 0) is (wished and optimizer == "FusedAdam"), transcript(run)
    assert ("fp8_param" in left_out) is (wished and optimizer != "FusedAdam"), left_out


def test_auto_keeps_a_narrow_model_in_bf16_and_reports_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    run = in_fork([tmp_path / "train.py", "auto", "AdamW", "linear"], cwd=tmp_path, MPGUARD_POLICY='{"bf16": true}')
    assert run.returncode == 0, transcript(run)
    facts = proof(tmp_path / "proof.json")
    assert facts["verdict"] == "in force" and facts["observed"]["fp8"] is None
    assert "too narrow to be faster in FP8" in facts["observed"]["left_out"]["fp8"]


def test_auto_trains_a_model_without_a_layer_for_fp8(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    run = in_fork([tmp_path / "train.py", "auto", "AdamW", "conv"], cwd=tmp_path, MPGUARD_POLICY='{"bf16": true}')
    assert run.returncode == 0, transcript(run)
    facts = proof(tmp_path / "proof.json")
    assert facts["verdict"] == "in force" and "no layer can be FP8" in facts["observed"]["left_out"]["fp8"]
