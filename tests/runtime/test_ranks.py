"""Which process is which rank, in programs whose launcher sets no RANK; and ranks that are not at the same step."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

import concurrent.futures

from paths import PROGRAMS
from processes import command, free_port, in_fork, mp_yaml, proof, results, run_module, run_python, transcript

import mpguard
from mpguard.runtime.proof import consensus

OWN, UNEVEN = PROGRAMS / "own_processes.py", PROGRAMS / "uneven.py"


@pytest.mark.parametrize("kind", ["spawn", "debug_launcher"])
def test_processes_that_a_script_starts_are_proven(tmp_path: Path, kind: str) -> None:
    run = command("python", OWN, kind, cwd=tmp_path)
    assert run.returncode == 0, transcript(run)
    assert results(run) == [{"rank": rank, "world": 2} for rank in (0, 1)]
    assert run.stderr.count("proven in force on all 2 ranks") == 1, transcript(run)
    assert run.stderr.count("mpguard 0.") == 1, "the header is printed once"
    assert "nothing was proven here" in run.stderr, "of the process that starts the others"
    assert proof(tmp_path / "proof.json")["verdict"] == "in force", "that of the others is kept"


def test_a_wrong_process_of_a_script_is_refused(tmp_path: Path) -> None:
    run = in_fork([OWN, "fork", "--fp32"], cwd=tmp_path, program=run_python)
    assert run.returncode == 1 and "rank 1: compute: fp32; asked: bf16" in run.stderr, transcript(run)
    assert proof(tmp_path / "proof.json")["verdict"] == "not in force"


def uneven(folder: Path, *words: str) -> list[subprocess.CompletedProcess[str]]:
    port = str(free_port())

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        policy = str(mpguard.recipe("bf16_mixed"))
        variables = {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return in_fork([UNEVEN, *words], cwd=folder, program=run_module, MPGUARD_POLICY=policy, **variables)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, (0, 1)))


def test_a_rank_that_skips_its_first_steps_is_not_waited_for(tmp_path: Path) -> None:
    ended = uneven(tmp_path)
    assert [each.returncode for each in ended] == [0, 0], "\n".join(map(transcript, ended))
    assert "rank 0 waits for rank 1: no step of this optimizer there yet" in ended[0].stderr
    assert "step 1 proven in force on all 2 ranks" in ended[0].stderr
    assert ended[1].stderr == "", "LOCAL_RANK is enough for one header"


def test_a_rank_that_never_steps_is_named(tmp_path: Path) -> None:
    ended = uneven(tmp_path, "--always")
    assert [each.returncode for each in ended] == [1, 1], "\n".join(map(transcript, ended))
    assert "not proven: rank 1: the run computed gradients and ended" in ended[0].stderr, transcript(ended[0])


def test_missing_ranks_are_named_with_a_limit() -> None:
    assert consensus.names_of([3]) == "rank 3"
    assert consensus.names_of(list(range(1, 4096))) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4087 more"


WORKERS = """
import os
import torch
from mpguard.runtime import guard
from mpguard.watching import current as watching
from torch import nn
from torch.utils.data import DataLoader, Dataset

parent = os.getpid()
# As if CUDA had been initialized before the fork; not in the parent, whose torch may have no CUDA.
torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent
os.register_at_fork(
    before=lambda: setattr(torch.cuda, "_initialized", True),
    after_in_parent=lambda: setattr(torch.cuda, "_initialized", False),
)

class Event:
    def __del__(self):
        if os.getpid() != parent:
            os.write(2, b"an object of CUDA is freed\\n")

class Noise(Dataset):
    transform = nn.Identity()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        for _ in range(400):
            x = self.transform(torch.randn(8))
        assert guard.current() is None and watching.current() is None
        return x

net = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(net.parameters())
watching.of_parent()._names[-1] = Event()
for epoch in range(2):
    for x in DataLoader(Noise(), batch_size=8, num_workers=1, multiprocessing_context="fork"):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        y.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("finished")
"""


def test_a_process_that_was_forked_after_cuda_leaves_everything_to_its_parent(tmp_path: Path) -> None:
    """Data is loaded in such processes. They can neither stop the profiler nor free what belongs to CUDA."""
    (tmp_path / "train.py").write_text(WORKERS)
    run = in_fork(["--config", mp_yaml(tmp_path), "train.py"], cwd=tmp_path)
    assert run.returncode == 0 and "finished" in run.stdout, transcript(run)
    assert "in force at steps 1-16 (5 checks)" in run.stderr, transcript(run)
    assert "freed" not in run.stderr and "failed" not in run.stderr, transcript(run)
