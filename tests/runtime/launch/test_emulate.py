"""`mpguard launch --emulate`: a recipe for another GPU is rehearsed in software, and header and proof say so."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchao", reason="the real library runs here")

from processes import launch_in_forks, mp_yaml, proof, transcript

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16): loss = model(torch.randn(32, 32)).float().square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def config(folder: Path, recipe: str) -> Path:
    (folder / "t.py").write_text(SCRIPT)
    return mp_yaml(folder, mixed_precision="fp8", fp8_config=f"{{mpguard_recipe: {recipe}}}")


@pytest.mark.parametrize(
    ("recipe", "what", "found"),
    [
        ("blackwell_bf16_with_mxfp8_mixed", "MXFP8", "2 of 2 Linear (torchao mxfp8, emulated)"),
        ("hopper_bf16_with_fp8_mixed", "FP8", "2 of 2 Linear (torchao tensorwise, emulated)"),
    ],
)
def test_a_recipe_is_emulated_and_proven(tmp_path: Path, recipe: str, what: str, found: str) -> None:
    path = config(tmp_path, recipe)
    ended = launch_in_forks("--config", path, "--emulate", "--proof-json", "p.json", "t.py", cwd=tmp_path)
    assert ended.returncode == 0, transcript(ended)
    assert f"{what} emulated: its numbers, not its speed" in ended.stderr, transcript(ended)
    rows = proof(tmp_path / "p.json")["rows"]
    assert rows["fp8"]["found"] == found and rows["compute"]["found"] == "fp8"


def test_the_refusal_without_the_gpu_names_the_option(tmp_path: Path) -> None:
    ended = launch_in_forks("--config", config(tmp_path, "blackwell_bf16_with_mxfp8_mixed"), "t.py", cwd=tmp_path)
    assert ended.returncode == 1 and "in software, slowly: `mpguard launch --emulate`" in ended.stderr


def test_what_torchao_does_not_have_is_refused(tmp_path: Path) -> None:
    path = config(tmp_path, "bf16_with_fp8_delayed_scaling_mixed")
    ended = launch_in_forks("--config", path, "--emulate", "t.py", cwd=tmp_path)
    assert ended.returncode == 2 and "backend is torchao, which has no delayed recipe" in ended.stderr
