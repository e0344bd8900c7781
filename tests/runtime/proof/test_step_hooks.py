"""What a script's hooks before and after the step of an optimizer do with gradients, weights and states."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import transcript
from short_programs import run

#: The gradient of one pass under autocast has values of BF16 already, their sum has not.
ACCUMULATING = """
for _ in range(3):
    for part in x.split(8):
        with amp(): loss = m(part).float().pow(2).mean()
        loss.backward()
    o.step(); o.zero_grad()
"""
AFTER = "o.register_step_post_hook(lambda o, *_: [{} for s in o.state.values()])"
WRONG = {
    "states_after": (AFTER.format("s['exp_avg'].copy_(s['exp_avg'].bfloat16())"), "states fp32 rounded to bf16"),
    "weights_after": (
        "o.register_step_post_hook(lambda *_: [p.data.copy_(p.data.bfloat16()) for p in m.parameters()])",
        "weights fp32 rounded to bf16",
    ),
    "gradients_before": (
        "o.register_step_pre_hook(lambda *_: [p.grad.copy_(p.grad.bfloat16()) for p in m.parameters()] and None)",
        "gradients: fp32, rounded to bf16 in a hook before the step",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_hook_of_a_step_rounds_is_refused(tmp_path: Path, name: str) -> None:
    hook, text = WRONG[name]
    ended = run(tmp_path, f"m = net(); o = adam(m)\n{hook}\n{ACCUMULATING}")
    assert ended.returncode == 1 and text in ended.stderr, transcript(ended)


def test_hooks_of_a_step_that_clamp_scale_and_average_are_proven(tmp_path: Path) -> None:
    script = """
m = net(); o = adam(m); mean = [p.detach().clone() for p in m.parameters()]
o.register_step_pre_hook(lambda *_: [p.grad.mul_(0.3).clamp_(-1e-3, 1e-3) for p in m.parameters()] and None)
o.register_step_post_hook(lambda *_: [p.data.clamp_(-0.1, 0.1) for p in m.parameters()])
o.register_step_post_hook(lambda *_: [a.lerp_(p.detach(), 0.1) for a, p in zip(mean, m.parameters())])
o.register_step_post_hook(lambda o, *_: [s["exp_avg"].mul_(0.9) for s in o.state.values()])
train(m, o, steps=8)
"""
    ended = run(tmp_path, script)
    assert ended.returncode == 0, transcript(ended)
