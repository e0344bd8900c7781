"""Build locks of torch extensions: held ones and stale ones."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import launch, mp_yaml

from mpguard.policy.recipes import recipe
from mpguard.runtime.launch import build_locks
from mpguard.runtime.launch.build_locks import BUILD_SECONDS, abandoned_locks, extensions_folder, stale_locks
from mpguard.runtime.launch.launcher import PreparedLaunch, _uses_deepspeed
from mpguard.runtime.plan import Plan

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="open files are read from /proc")

#: Takes torch's lock as a build does, and keeps it until its standard input ends.
HOLD = "import os, sys; fd = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def lock_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of torch before 2.14, with any torch."""
    monkeypatch.setattr(build_locks, "held_by_the_kernel", lambda: False)


@pytest.mark.usefixtures("lock_is_a_file")
def test_a_lock_is_stale_once_its_process_was_killed(tmp_path: Path) -> None:
    build = tmp_path / "py311_cpu" / "deepspeed_shm_comm"
    build.mkdir(parents=True)
    command = [sys.executable, "-c", HOLD, str(build / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert stale_locks(tmp_path) == [], "its process is running"
        process.kill()
    assert stale_locks(tmp_path) == [build / "lock"]
    (build / "lock").unlink()
    assert stale_locks(tmp_path) == []


def test_the_lock_is_the_one_that_torch_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    build = Path(cpp_extension._get_build_directory("mine", verbose=False))
    assert extensions_folder() in build.parents
    if build_locks.held_by_the_kernel():
        with cpp_extension.FileLock(str(build / "lock")):
            pass
    else:
        baton = cpp_extension.FileBaton(str(build / "lock"))
        assert baton.try_acquire()
        assert stale_locks() == []
        baton.release()
    assert stale_locks() == [], "a build that has ended blocks no other"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(extensions_folder()) == cpp_extension.get_default_build_root()


def test_no_folder_has_no_locks(tmp_path: Path) -> None:
    assert stale_locks(tmp_path / "none") == []


@pytest.mark.usefixtures("lock_is_a_file")
def test_a_young_lock_may_be_held_where_this_machine_cannot_see_it(tmp_path: Path) -> None:
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert stale_locks(tmp_path) == [lock] and abandoned_locks(tmp_path) == []
    _make_old(lock)
    assert abandoned_locks(tmp_path) == [lock]


def _make_old(lock: Path) -> None:
    os.utime(lock, (time.time() - BUILD_SECONDS - 60,) * 2)


def test_a_lock_that_the_kernel_holds_is_never_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    _make_old(lock)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.14.1+cu130")
    assert abandoned_locks(tmp_path) == []
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    assert abandoned_locks(tmp_path) == [lock]


def test_launch_names_a_stale_lock_where_deepspeed_is_used_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    build = tmp_path / "py311_cpu" / "deepspeed_shm_comm"
    build.mkdir(parents=True)
    (build / "lock").touch()
    _make_old(build / "lock")
    (tmp_path / "train.py").write_text("# deepspeed\nprint('trained')\n")
    config = mp_yaml(tmp_path)
    run = launch("--config", config, "train.py", cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert run.returncode == 0 and "trained" in run.stdout, run.stderr
    named = f"mpguard: {build / 'lock'}: a build of a torch extension was killed" in run.stderr
    assert named is not build_locks.held_by_the_kernel()


def test_a_launch_without_deepspeed_names_no_lock() -> None:
    launch = PreparedLaunch(Plan(recipe("bf16_mixed"), strategy="ddp"), ("--cpu",), __name__, ("--lr", "1"), {}, "")
    assert not _uses_deepspeed(launch)
    assert _uses_deepspeed(dataclasses.replace(launch, arguments=("--deepspeed", "ds.json")))
    assert _uses_deepspeed(dataclasses.replace(launch, plan=Plan(recipe("bf16_mixed"), strategy="deepspeed-zero2")))
