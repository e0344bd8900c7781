"""Nodes of one job on this machine: a launcher for each, as a user would start them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from limits import seconds
from processes import BIN, environment, free_port, mp_yaml

import mpguard

#: A program that trains with an `Accelerator`; `SAYS` is what each rank prints at the end. Step 4 has a place for more.
PROGRAM = """
import os, signal, sys, time
import torch
from accelerate import Accelerator

accelerator = Accelerator()
rank = accelerator.process_index
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(1, 7):
    if step == 4:
        pass  # HERE
    loss = model(torch.randn(4, 8)).float().square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print("rank", rank, "of", accelerator.num_processes, "finished", flush=True)
"""


class Node:
    """A launcher that was started for one node."""

    def __init__(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        self.process, self._output = process, output

    def wait(self, limit: float = 120) -> int:
        return self.process.wait(seconds(limit))

    @property
    def output(self) -> str:
        """Standard output and errors, as a console shows them."""
        return Path(self._output.name).read_text(encoding="utf-8")

    @property
    def last_line(self) -> str:
        return self.output.splitlines()[-1]


class Nodes:
    """The nodes of one job, with one port. count: how many; processes: of each of them."""

    def __init__(self, folder: Path, count: int = 2, processes: int = 1, backend: str = "static") -> None:
        self.folder, self.count, self.processes, self.backend = folder, count, processes, backend
        self.port = free_port()
        self.started: list[Node] = []

    def config(self, number: int, **keys: object) -> Path:
        """Write the mp.yaml of a node, in a folder of its own."""
        folder = self.folder / f"node{number}"
        folder.mkdir(exist_ok=True)
        machine = {
            "distributed_type": "MULTI_CPU",
            "num_machines": self.count,
            "machine_rank": number,
            "num_processes": self.count * self.processes,
            "main_process_ip": "127.0.0.1",
            "main_process_port": self.port,
            "rdzv_backend": self.backend,
        }
        return mp_yaml(folder, **{**machine, **keys})

    def launch(self, number: int, *words: object, program: Sequence[str] = ("mpguard", "launch"), **more: str) -> Node:
        """Start the launcher of a node in its folder: `mpguard launch`, or another program."""
        folder = self.folder / f"node{number}"
        folder.mkdir(exist_ok=True)
        output = (self.folder / f"output{number}").open("w")
        process = subprocess.Popen(
            [str(BIN / program[0]), *program[1:], *map(str, words)],
            cwd=folder, env=environment(**more), stdout=output, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        node = Node(process, output)
        self.started.append(node)
        return node

    def torchrun(self, number: int, *words: object, **more: str) -> Node:
        """Start `torchrun -m mpguard.run` for a node."""
        where = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{self.port}", "--rdzv_id", "job"]
        if self.backend == "static":
            where = ["--node_rank", str(number), "--master_addr", "127.0.0.1", "--master_port", str(self.port)]
        flags = ["--nnodes", str(self.count), "--nproc_per_node", str(self.processes), *where]
        return self.launch(number, *words, program=("torchrun", *flags, "-m", "mpguard.run"), **more)


@contextlib.contextmanager
def nodes(folder: Path, count: int = 2, processes: int = 1, backend: str = "static") -> Iterator[Nodes]:
    """Give the nodes of a job; what still runs at the end of the block is killed with all its children."""
    made = Nodes(folder, count, processes, backend)
    try:
        yield made
    finally:
        for node in made.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait()


def script(folder: Path, at_step_4: str = "pass") -> Path:
    """Write the program, with a statement at the fourth step."""
    path = folder / "train.py"
    path.write_text(PROGRAM.replace("pass  # HERE", at_step_4))
    return path


def recipe(name: str) -> str:
    """Return a policy as MPGUARD_POLICY has it."""
    return str(mpguard.recipe(name))


def wait_for(text: str, node: Node, limit: float = 60) -> None:
    """Wait until the output of a node has a text."""
    deadline = time.monotonic() + seconds(limit)
    while text not in node.output:
        assert time.monotonic() < deadline and node.process.poll() is None, node.output
        time.sleep(0.1)
