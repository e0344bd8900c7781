"""A rank or a node that dies: the last line of each survivor names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from nodes import nodes, script

KILLED = "if rank == {}: os.kill(os.getpid(), signal.SIGKILL)"
RAISES = "if rank == {}: raise ValueError('no data here')"
NODE_LOST = "if rank == {}: os.kill(os.getppid(), signal.SIGKILL); os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("statement", "lost", "line"),
    [
        (KILLED, 1, "rank 1 (node 1, "),
        (RAISES, 1, "ended with ValueError: no data here"),
        (NODE_LOST, 1, "rank 1 (node 1, "),
        (NODE_LOST, 0, "the node of rank 0 was lost"),
    ],
)
@pytest.mark.parametrize("program", ["launch", "torchrun"])
def test_the_last_line_of_a_survivor_names_the_rank_that_died(
    tmp_path: Path, statement: str, lost: int, line: str, program: str
) -> None:
    train = script(tmp_path, statement.format(lost))
    with nodes(tmp_path) as job:
        for number in range(2):
            start = job.launch if program == "launch" else job.torchrun
            start(number, "--config", job.config(number), train)
        survivor = job.started[1 - lost]
        assert survivor.wait() == 1, survivor.output
        assert all(node.wait() for node in job.started)
        own = [each for each in survivor.output.splitlines() if each.startswith("mpguard: rank")]
        assert own and line in own[-1] and "ended because of another one" in own[-1], survivor.output
        assert "containment.py" not in survivor.output
        if program == "launch":
            assert survivor.last_line == own[-1]


def test_the_launcher_of_a_killed_rank_names_it(tmp_path: Path) -> None:
    train = script(tmp_path, KILLED.format(1))
    with nodes(tmp_path, 1, 2) as job:
        node = job.launch(0, "--config", job.config(0), train)
        assert node.wait() == 128 + 9
        assert node.last_line.startswith("mpguard: rank 1 (") and node.last_line.endswith("was ended by SIGKILL")
