"""Two and four nodes: each way to start them, and a node that differs from the others."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from limits import seconds
from nodes import Nodes, nodes, recipe, script, wait_for
from processes import BIN, proof

BACKENDS = ("static", "c10d")


def all_proven(job: Nodes, ranks: int) -> None:
    statuses = [node.wait() for node in job.started]
    shown = "\n".join(node.output for node in job.started)
    assert not any(statuses), shown
    assert shown.count(f"step 1 proven in force on all {ranks} ranks") == 1, shown
    assert all(f"rank {rank} of {ranks} finished" in shown for rank in range(ranks)), shown


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("count", "processes"), [(2, 2), (4, 1)])
def test_launch(tmp_path: Path, backend: str, count: int, processes: int) -> None:
    train = script(tmp_path)
    with nodes(tmp_path, count, processes, backend) as job:
        for number in range(count):
            job.launch(number, "--config", job.config(number), "--proof-json", "proof.json", train)
        all_proven(job, count * processes)
    assert proof(tmp_path / "node0" / "proof.json")["verdict"] == "in force"
    assert not (tmp_path / "node1" / "proof.json").exists(), "rank 0 writes it"


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchrun(tmp_path: Path, backend: str) -> None:
    train = script(tmp_path)
    with nodes(tmp_path, 2, 2, backend) as job:
        for number in range(2):
            job.torchrun(number, "--config", job.config(number), train)
        all_proven(job, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchrun_with_another_policy_on_one_node(tmp_path: Path, backend: str) -> None:
    train = script(tmp_path)
    with nodes(tmp_path, 2, 1, backend) as job:
        for number, name in enumerate(("bf16_mixed", "fp32")):
            job.torchrun(number, train, MPGUARD_POLICY=recipe(name), ACCELERATE_USE_CPU="true")
        assert all(node.wait() for node in job.started)
        shown = "".join(node.output for node in job.started)
        assert "the ranks have different plans" in shown and "finished" not in shown, shown
        assert "containment.py" not in shown


#: What `mpguard hook install` writes into site-packages, here for the processes of one test.
HOOK = "import mpguard.runtime.launch.startup_hook"


@pytest.mark.parametrize("backend", BACKENDS)
def test_accelerate_launch_with_the_hook(tmp_path: Path, backend: str) -> None:
    train = script(tmp_path)
    (tmp_path / "hooked").mkdir()
    (tmp_path / "hooked" / "sitecustomize.py").write_text(HOOK)
    with nodes(tmp_path, 2, 1, backend) as job:
        for number in range(2):
            words = ("--config_file", job.config(number), train)
            job.launch(number, *words, program=("accelerate", "launch"), PYTHONPATH=str(tmp_path / "hooked"))
        all_proven(job, 2)


def test_a_node_that_starts_late(tmp_path: Path) -> None:
    train = script(tmp_path)
    with nodes(tmp_path) as job:
        job.launch(0, "--config", job.config(0), train)
        time.sleep(20)
        job.launch(1, "--config", job.config(1), train)
        all_proven(job, 2)


#: Runs a program with every file system read-only but a new one for temporary files, which torchelastic needs.
READ_ONLY = ("unshare", "-m", "sh", "-c")
MOUNTS = "mount --bind / / && mount -o remount,ro,bind / && mount -t tmpfs none /var/tmp"


def test_a_node_with_a_read_only_disk(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*READ_ONLY, MOUNTS], capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    train = script(tmp_path)
    with nodes(tmp_path) as job:
        configs = [job.config(number) for number in range(2)]
        job.launch(0, "--config", configs[0], train)
        words = f"{MOUNTS} && cd {configs[1].parent} && {BIN / 'mpguard'} launch --config {configs[1]} {train}"
        job.launch(1, words, program=(str(shutil.which("unshare")), *READ_ONLY[1:]), TMPDIR="/var/tmp")
        all_proven(job, 2)


OTHER_VERSION = """
import sys
if "mpguard.run" in sys.orig_argv:
    from mpguard.core import version
    version.__version__ = "9.9.9"
"""


def test_a_node_with_another_mpguard(tmp_path: Path) -> None:
    train = script(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(OTHER_VERSION)
    with nodes(tmp_path) as job:
        job.launch(0, "--config", job.config(0), train)
        job.launch(1, "--config", job.config(1), train, PYTHONPATH=str(tmp_path / "other"))
        assert [node.wait() for node in job.started] == [1, 1]
        for node in job.started:
            assert "the ranks have different versions of mpguard: rank 0" in node.output, node.output
            assert "mpguard 9.9.9. Install the same one on all nodes" in node.output, node.output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_that_waits_for_another(
    tmp_path: Path, backend: str, number: int, ending: signal.Signals
) -> None:
    train = script(tmp_path)
    with nodes(tmp_path, backend=backend) as job:
        node = job.launch(number, "--config", job.config(number), train)
        wait_for("recipe bf16_mixed", node)
        time.sleep(seconds(1))
        node.process.send_signal(ending)
        assert node.wait(5) == 128 + ending, node.output
        assert node.last_line.startswith(f"mpguard: ended by {ending.name}"), node.output
