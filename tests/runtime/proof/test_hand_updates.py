"""Trained parameters that no optimizer has: what the script updates itself is named, and refused if it is in BF16."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import proof, transcript
from short_programs import run

LOOP = """
body, head = nn.Linear(32, 32), nn.Linear(32, 8); o = adam(head)
mean = [p.detach().clone() for p in body.parameters()]
for step in range(6):
    with amp(): loss = head(body(x).relu()).float().pow(2).mean()
    o.zero_grad(); body.zero_grad(); loss.backward(); o.step()
    with torch.no_grad():
        for p, m in zip(body.parameters(), mean): UPDATE
"""

ROUNDED = {
    "computed_in_bf16": "p.copy_((p.bfloat16() - 1e-2 * p.grad.bfloat16()).float())",
    "rounded_after_each_step": "p.copy_((p - 1e-2 * p.grad).bfloat16().float())",
    "replaced": "p.data = (p - 1e-2 * p.grad).half().float()",
}

RIGHT = {
    "updated_in_fp32": ("p.sub_(1e-2 * p.grad)", True),
    "averaged": ("p.lerp_(m + step, 0.5)", True),
    "only_has_gradients": ("pass", False),
    "set_once": ("p.copy_(p.bfloat16().float()) if step == 1 else None", False),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_weights_that_the_script_updates_in_16_bits_are_refused(tmp_path: Path, name: str) -> None:
    ended = run(tmp_path, LOOP.replace("UPDATE", ROUNDED[name]))
    assert ended.returncode == 1 and "in no optimizer that is known; asked: fp32" in ended.stderr, transcript(ended)
    assert proof(tmp_path / "proof.json")["rows"]["updates by the script"]["ok"] is False


@pytest.mark.parametrize("name", RIGHT)
def test_other_updates_by_the_script_are_no_refusal(tmp_path: Path, name: str) -> None:
    update, _ = RIGHT[name]
    ended = run(tmp_path, LOOP.replace("UPDATE", update))
    assert ended.returncode == 0, transcript(ended)


NUMBERS = {
    "loss": ("loss = m(x).pow(2).mean().bfloat16()", "pass", "the loss is in bf16"),
    "loss_and_log_probabilities": (
        "loss = -F.log_softmax(m(x), -1)[:, 0].mean()",
        "pass",
        "which has 2 to 3 digits, and so are log-probabilities that enter it (autocast for the CPU",
    ),
    "log_probabilities": ("loss = -F.log_softmax(m(x), -1)[:, 0].float().mean()", "pass", "enter the loss are in bf16"),
    "step_count": (
        "loss = m(x).float().pow(2).mean()",
        "[s.update(step=s['step'].bfloat16()) for s in o.state.values()]",
        "the optimizer counts its steps in bf16",
    ),
    "nothing": ("loss = F.cross_entropy(m(x).float(), x[:, 0].long() % 32)", "pass", ""),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_16_bits_that_decide_about_a_step_are_remarks(tmp_path: Path, name: str) -> None:
    loss, after, text = NUMBERS[name]
    ended = run(
        tmp_path,
        f"x = x.abs(); m = net(); o = adam(m)\nfor _ in range(3):\n    with amp(): {loss}\n"
        f"    o.zero_grad(); loss.backward(); torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0); o.step(); {after}\n",
    )
    assert ended.returncode == 0, transcript(ended)
    remarks = [line for line in ended.stderr.splitlines() if "16, which has" in line or "counts" in line]
    assert text in ended.stderr and len(remarks) == bool(text), transcript(ended)


def test_a_gradient_norm_in_bf16_is_a_remark(tmp_path: Path) -> None:
    script = (
        "m = net().bfloat16(); o = adam(m)\nfor _ in range(3):\n"
        "    m(x.bfloat16()).float().pow(2).mean().backward()\n"
        "    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0); o.step(); o.zero_grad()\n"
    )
    ended = run(tmp_path, script, recipe="bf16_full")
    assert ended.returncode == 0 and "gradients are clipped is in bf16" in ended.stderr, transcript(ended)
