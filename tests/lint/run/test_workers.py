"""Worker processes: same findings in the same order, workers that die, an interrupt."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import seconds
from made_rules import MakeRule, engine, found, many
from paths import TESTS

from mpguard.lint.model.rule import Diagnostic, Rule


def test_workers_find_the_same_in_the_same_order(tmp_path: Path, make_rule: MakeRule) -> None:
    made = make_rule("MPG901", "alpha")
    targets = many(tmp_path, 60)
    alone = engine(made).run(targets, jobs=1)
    assert sum(len(each.findings) for each in alone) == sum(number % 7 + 1 for number in range(60))
    assert engine(made).run(targets, jobs=3) == alone


def test_a_worker_that_dies_takes_only_its_file_with_it(tmp_path: Path, make_rule: MakeRule) -> None:
    def check(self: Rule, facts: Any) -> Iterator[Diagnostic]:
        if facts.path.endswith(("f005.py", "f011.py")):
            faulthandler.disable()  # pytest's, which would print a traceback
            os.kill(os.getpid(), signal.SIGSEGV)
        yield self.at((0, 5))

    reports = engine(make_rule("MPG901", "alpha", check=check)).run(many(tmp_path, 40), jobs=2)
    dead = [each for each in reports if each.findings[0].code == "MPG000"]
    assert [Path(each.target.path).name for each in dead] == ["f005.py", "f011.py"]
    assert "was killed by SIGSEGV" in dead[0].findings[0].message
    assert all(found(each) == [("MPG901", 1)] for each in reports if each not in dead)


NEXT_TO_AN_IDLE_WORKER = """
import os, selectors
from mpguard.lint.run import workers
pool = workers._Pool(range(4), lambda task: task, None, lambda task: 1, 2, on_progress=None)
idle = workers._Worker(0, -1, os.pipe()[0], [], bytearray())
pool._workers.append(idle)
with selectors.DefaultSelector() as selector:
    pool._start(selector)
    pool._workers.remove(idle)
    while pool._workers:
        for key, _ in selector.select():
            pool._receive(key.data, selector)
print(sorted(pool._results))
"""


def test_a_worker_is_started_next_to_an_idle_one() -> None:
    """Where one has died. The pipe of the other is closed, and what raises in a child makes it a second parent."""
    command = [sys.executable, "-c", NEXT_TO_AN_IDLE_WORKER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))
    assert (done.stdout, done.stderr) == ("[0, 1, 2, 3]\n", "")


CTRL_C = """
import sys, time
sys.path[:0] = {tests!r}
from pathlib import Path
from made_rules import engine, many
from mpguard.lint.model.rule import Rule
class Slow(Rule):
    code, name, severity, message = "MPG999", "slow", "error", "slow"
    def check(self, facts):
        Path(facts.path + ".begun").touch()
        time.sleep(60)
        return iter(())
from mpguard.cli import main
engine(Slow).run(many(Path({folder!r}), 12), jobs=2)
"""


@pytest.mark.parametrize("whole_group", [True, False], ids=["Ctrl-C", "only the parent"])
def test_an_interrupt_ends_all_workers(tmp_path: Path, whole_group: bool) -> None:
    code = CTRL_C.format(tests=[str(TESTS / "support")], folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + seconds(60)
        while len(list(tmp_path.glob("*.begun"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(workers) == 2
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=seconds(30))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert error.rstrip().endswith("KeyboardInterrupt"), "one traceback at most, of the parent"
    assert error.count("Traceback") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
