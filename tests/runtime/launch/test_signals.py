"""A launcher that waits for another node in C++ ends soon after a signal; one that has workers is left alone."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real store runs here")

from limits import seconds
from processes import free_port, started

#: Waits for a second node as torchelastic's static rendezvous does, or has a child process.
LAUNCHER = """
import atexit, datetime, subprocess, sys, time
from mpguard.runtime.launch import signals
atexit.register(print, "cleaned up", flush=True)
with signals.as_exceptions(), signals.ending_what_waits():
    if sys.argv[1] == "waits":
        from torch.distributed import TCPStore
        print("ready", flush=True)
        TCPStore("127.0.0.1", int(sys.argv[2]), 2, True, datetime.timedelta(seconds=600))
    child = subprocess.Popen(["sleep", "600"])
    try:
        print("ready", flush=True)
        child.wait()
    except BaseException as error:
        print("handled", flush=True)
        time.sleep(2 * signals.REACTION)
        child.kill()
        sys.exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_launcher_that_waits_for_another_node(tmp_path: Path, number: signal.Signals) -> None:
    errors = tmp_path / "errors"
    with (
        errors.open("w") as file,
        started("python", "-c", LAUNCHER, "waits", free_port(), cwd=tmp_path, errors=file) as launcher,
    ):
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        time.sleep(seconds(1))  # then it is in C++
        launcher.send_signal(number)
        assert launcher.wait(seconds(20)) == 128 + number
        assert launcher.stdout.read() == "cleaned up\n"
    (line,) = [line for line in errors.read_text().splitlines() if line.startswith("mpguard:")]
    assert line.startswith(f"mpguard: ended by {number.name} while no process of this node ran")


def test_a_launcher_with_workers_ends_them_itself(tmp_path: Path) -> None:
    with started("python", "-c", LAUNCHER, "works", cwd=tmp_path) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(seconds(20)) == 7
        assert launcher.stdout.read() == "handled\ncleaned up\n"
