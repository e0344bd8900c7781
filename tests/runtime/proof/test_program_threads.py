"""Several threads of one program that train at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from processes import transcript
from short_programs import run

THREADS = """
import threading
def trained(number):
    m = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)); o = torch.optim.AdamW(m.parameters(), 1e-3)
    for i in range(60):
        x = torch.randn(32, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=WANTED):
            l = F.cross_entropy(m(x), (x[:, 0] > 0).long())
        o.zero_grad(); l.backward(); o.step()
threads = [threading.Thread(target=trained, args=(number,)) for number in range(3)]
for each in threads: each.start()
for each in threads: each.join()
"""


@pytest.mark.parametrize(("wanted", "status"), [("True", 0), ("number != 2", 1)])
def test_threads_that_train_at_the_same_time_are_proven_each(tmp_path: Path, wanted: str, status: int) -> None:
    """What another thread changes is not read: that ended the process with a segmentation fault."""
    ended = run(tmp_path, THREADS.replace("WANTED", wanted))
    assert ended.returncode == status, transcript(ended)
    assert ("2 other optimizers too" in ended.stderr) is (status == 0), transcript(ended)
