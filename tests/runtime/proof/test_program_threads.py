"""Several threads of one program that train at the same time."""

from __future__ import annotations

import subprocess
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


DURING_A_PASS = """
import threading
begun, stepped = threading.Event(), threading.Event()
def waits(_): begun.set(); stepped.wait(60)
def trained(number):
    m = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    o = [torch.optim.SGD, torch.optim.AdamW][number](m.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=DTYPE is torch.float16)
    if number: assert begun.wait(60)
    for i in range(8):
        x = torch.randn(32, 16)
        with torch.autocast("cpu", dtype=DTYPE, enabled=WANTED):
            l = F.cross_entropy(m(x), (x[:, 0] > 0).long())
        if not number and not i: l.register_hook(waits)
        o.zero_grad(); scaler.scale(l).backward()
        try: scaler.step(o)
        finally: stepped.set()
        scaler.update()
threads = [threading.Thread(target=trained, args=(number,)) for number in range(2)]
for each in threads: each.start()
for each in threads: each.join()
"""


def run_during_a_pass(folder: Path, *, dtype: str, wanted: str) -> subprocess.CompletedProcess[str]:
    recipe = {"float16": "fp16_mixed", "bfloat16": "bf16_mixed"}[dtype]
    script = DURING_A_PASS.replace("DTYPE", f"torch.{dtype}").replace("WANTED", wanted)
    return run(folder, script, recipe=recipe)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_thread_that_steps_during_the_pass_of_another_is_proven_by_its_own_graph(tmp_path: Path, dtype: str) -> None:
    ended = run_during_a_pass(tmp_path, dtype=dtype, wanted="True")
    assert ended.returncode == 0, transcript(ended)
    assert "inferred from autograd's graph: another thread computed gradients at the same time" in ended.stderr
    assert "1 other optimizer too" in ended.stderr, transcript(ended)


@pytest.mark.parametrize("wrong", [0, 1])
def test_it_is_not_proven_by_the_pass_of_the_other(tmp_path: Path, wrong: int) -> None:
    """That of the first thread is open while the second one steps: neither vouches for the other, or is blamed."""
    ended = run_during_a_pass(tmp_path, dtype="bfloat16", wanted=f"number != {wrong}")
    assert ended.returncode == 1, transcript(ended)
    assert ("step 1 proven in force" in ended.stderr) is (wrong == 0), transcript(ended)
    assert "not in force: compute: fp32" in ended.stderr, transcript(ended)
    assert f"in the step of {['SGD', 'AdamW'][wrong]}" in ended.stderr, transcript(ended)
