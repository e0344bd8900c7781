"""Which later steps are checked: those in other autocast regions than the steps that were checked before."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import transcript
from short_programs import run

from mpguard.policy.recipes import recipe
from mpguard.runtime import later_checks
from mpguard.runtime.guard import Guard
from mpguard.runtime.plan import Plan
from mpguard.runtime.progress import Progress

#: CALL: the forward pass of step i, which is one of SPECIAL in some steps that are no powers of two.
STEPS = """
m = net(); o = adam(m)
for i in range(1, 40):
    special = SPECIAL
    CALL
    y.float().pow(2).mean().backward(); o.step(); o.zero_grad()
"""

IN_FP16 = "with torch.autocast('cpu', torch.float16 if special else torch.bfloat16): y = m(x)"
WITHOUT = "with torch.autocast('cpu', torch.bfloat16, enabled=not special): y = m(x)"
NO_REGION = """if special: y = m(x)
    else:
        with amp(): y = m(x)"""


@pytest.mark.parametrize("call", [IN_FP16, WITHOUT, NO_REGION], ids=["fp16", "disabled", "no_region"])
def test_some_steps_in_another_precision_are_refused(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(later_checks, "AWAITED_SECONDS", 60.0)  # however busy the machine is
    script = STEPS.replace("SPECIAL", "i % 10 == 5").replace("CALL", call)
    ended = run(tmp_path, script)
    assert ended.returncode == 1 and "step 15: compute: " in ended.stderr, transcript(ended)


def test_a_step_that_does_not_come_again_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation in other regions between two steps: some steps are checked, and then no more for it."""
    guard, progress = Guard(Plan(recipe("bf16_mixed"))), Progress("AdamW", proven=True)
    usual, other = ("cpu", "torch.bfloat16", True), ("cpu", "torch.float16", True)

    def awaited(number: int) -> bool:
        progress.switches = 0
        guard.regions = {usual, other} if number % 50 == 20 else {usual}
        guard._compare_regions(progress, checked=number == 1)
        return progress.switches == -1

    due = [number for number in range(1, 200) if awaited(number)]
    assert due == list(range(20, 20 + later_checks.AWAITED_STEPS))
