"""FP16 with a fused optimizer on a GPU, whose flags of skipped steps are read together and not at each step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import command, mp_yaml, proof, transcript

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).cuda()
o = torch.optim.AdamW(m.parameters(), 1e-3, fused=sys.argv[1] == "fused"); scaler = torch.amp.GradScaler("cuda")
x = torch.randn(16, 32, device="cuda")
for step in range(400):
    with torch.autocast("cuda", torch.float16): loss = m(x).float().pow(2).mean()
    loss = loss * float("inf") if step in eval(sys.argv[2]) else loss
    scaler.scale(loss).backward(); scaler.step(o); scaler.update(); o.zero_grad()
print("finished")
"""


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_skipped_steps_are_counted_and_a_collapse_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "t.py").write_text(SCRIPT)
    config = mp_yaml(tmp_path, recipe="fp16_mixed", mixed_precision="fp16", use_cpu="false")
    words = ("-m", "mpguard.run", "--config", config, "--proof-json", tmp_path / "proof.json", "t.py", kind)
    ended = command("python", *words, "(60, 61, 100)", cwd=tmp_path)
    (facts,) = proof(tmp_path / "proof.json")["run"]
    first = proof(tmp_path / "proof.json")["observed"]["skipped"]
    assert ended.returncode == 0 and facts["steps"] + facts["skipped"] == 400, transcript(ended)
    assert facts["skipped"] == first + 3 and f", {first + 3} steps skipped" in ended.stderr, transcript(ended)
    looks = facts["looks"]  # after step 16 one of each doubling, the same on all ranks
    assert looks[:5] == [1, 2, 4, 8, 16] and [each.bit_length() for each in looks[5:]] == [6, 7, 8, 9], transcript(
        ended
    )
    ended = command("python", *words, "range(61, 400)", cwd=tmp_path)
    assert ended.returncode == 1 and "finished" not in ended.stdout, transcript(ended)
    assert "129 optimizer steps in a row were skipped" in ended.stderr, transcript(ended)
    assert "the loss scale collapses. The run is refused after 128" in ended.stderr
