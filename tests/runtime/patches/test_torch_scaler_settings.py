"""Who sets the loss scale: a dynamic scale that the script sets to one value in each step is static."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import proof, transcript
from short_programs import run

LOOP = """
m = net(); o = adam(m); s = torch.amp.GradScaler("cpu"); BEFORE
for step in range(5):
    with amp(torch.float16): loss = m(x).float().pow(2).mean()
    o.zero_grad(); s.scale(loss).backward(); s.step(o); UPDATE
"""

STATIC = {
    "a_number": ("", "s.update(128.)", "update(128) after each step"),
    "a_tensor": ("", "s.update(torch.tensor(128.))", "update(128) after each step"),
    "filled": ("", "s.update(); s._scale.fill_(128.)", "its tensor is changed between update() and step()"),
    "another_tensor": ("", "s.update(); s._scale = torch.tensor(128.)", "its tensor is changed between"),
    "never_backs_off": ("s.set_backoff_factor(1.0)", "s.update()", "its backoff_factor is 1"),
    "new_in_each_step": ("", "s.update(); s = torch.amp.GradScaler('cpu', init_scale=64.)", "a new GradScaler in each"),
    "loaded_in_each_step": ("t = s.state_dict()", "s.update(); s.load_state_dict(t)", "load_state_dict() of one state"),
    "hardly_backs_off": ("s.set_backoff_factor(0.9999999)", "s.update()", "its backoff_factor is 0.9999999"),
}

DYNAMIC = {
    "ordinary": ("", "s.update()"),
    "backs_off_slowly": ("s.set_backoff_factor(0.9)", "s.update()"),
    "set_once": ("", "s.update(128.) if step == 2 else s.update()"),
    "rules_of_the_script": ("", "s.update(float(2 ** (10 - step)))"),
    "loaded": ("", "s.update(); t = s.state_dict(); s = torch.amp.GradScaler('cpu'); s.load_state_dict(t)"),
    "loads_its_own": ("", "s.update(); s.load_state_dict(s.state_dict())"),
    "new_once": ("", "s.update(); s = torch.amp.GradScaler('cpu') if step == 1 else s"),
    "skipped_by_an_overflow": ("", "s.update(); x[0, 0] = 6e4 if step == 0 else 0"),
}


@pytest.mark.parametrize("name", STATIC)
def test_a_scale_that_is_set_by_the_script_is_refused(tmp_path: Path, name: str) -> None:
    before, update, found = STATIC[name]
    ended = run(tmp_path, LOOP.replace("BEFORE", before).replace("UPDATE", update), recipe="fp16_mixed")
    assert ended.returncode == 1 and found in ended.stderr, transcript(ended)
    assert proof(tmp_path / "proof.json")["rows"]["scaler"]["ok"] is False


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_dynamic_scale_is_proven(tmp_path: Path, name: str) -> None:
    before, update = DYNAMIC[name]
    ended = run(tmp_path, LOOP.replace("BEFORE", before).replace("UPDATE", update), recipe="fp16_mixed")
    assert ended.returncode == 0, transcript(ended)
    assert proof(tmp_path / "proof.json")["rows"]["scaler"]["ok"] is True


def test_a_static_scale_can_be_allowed(tmp_path: Path) -> None:
    script = LOOP.replace("BEFORE", "").replace("UPDATE", "s.update(128.)")
    ended = run(tmp_path, script, "--allow", "loss_scaling", recipe="fp16_mixed")
    assert ended.returncode == 0, transcript(ended)
