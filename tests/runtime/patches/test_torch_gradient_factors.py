"""What torch multiplies gradients by."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import transcript
from short_programs import run

CLIPPED = """
from mpguard.runtime.proof import trace
names, read = [], trace.read
def reading(events, *args, **options):
    names.extend(event.name() for event in events)
    return read(events, *args, **options)
trace.read = reading
m = net(); o = adam(m)
for _ in range(4):
    with amp(): y = m(x)
    y.float().pow(2).mean().backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-4)
    norm = sum(float(own.grad.norm()) ** 2 for own in m.parameters()) ** 0.5
    o.step(); o.zero_grad()
print(f"norm {norm:.1e}, {names.count('aten::addmm') > 0}, {sum('foreach' in name for name in names)} of clipping")
"""


def test_the_operators_of_clipping_are_not_recorded(tmp_path: Path) -> None:
    """A check costs by the operator, and clipping has some for each parameter, none of which multiplies matrices."""
    ended = run(tmp_path, CLIPPED)
    assert "norm 1.0e-04, True, 0 of clipping" in ended.stdout, transcript(ended)
    assert ended.returncode == 0, transcript(ended)
