"""What holds for all tests: own cache folders, no colors, time limits for this machine, one build of an operator."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import limits
import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    """Once per session, before its workers start: measure the machine, and set where programs of tests write."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` of a script; programs of tests inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(session.config, "workerinput"):  # a worker of xdist
        return
    limits.scale()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are busy with other tests
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each program that a test starts compiles mpguard again
    _use_own_temporary_folder()
    if session.config.option.collectonly:
        return
    import deepspeed_operator

    cache = getattr(session.config, "cache", None)
    if cache is not None and deepspeed_operator.is_installed():
        # A build that is killed must not block the other programs of this user; those of one torch do not fit another.
        folder = cache.mkdir(f"torch_extensions{Path(sys.prefix).name}")
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collections, and keep what they import out of later ones.

    It is millions of objects that stay. Collections took a third of the time before the first test; torch.compile and
    some tests collect again and again, for the better part of a second each.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def compiled_deepspeed_operator(request: pytest.FixtureRequest) -> None:
    """Compile what DeepSpeed would compile in the first process of a module's tests, which have time limits."""
    import deepspeed_operator

    if deepspeed_operator.needed_by(request.path):
        try:
            deepspeed_operator.compile_once(request.config)
        except RuntimeError as error:
            pytest.exit(str(error), returncode=3)


def _use_own_temporary_folder() -> None:
    """Remove at the end what killed and forked programs leave; not the folders of pytest and the compiler's cache."""
    usual = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(usual, "torchinductor_of_tests")))
    own = tempfile.mkdtemp(prefix="mpguard-tests-")  # short: sockets in it have at most 107 characters
    Path(own).chmod(0o755)  # some tests become another user
    os.environ["TMPDIR"], tempfile.tempdir = own, own
    # multiprocessing removes its folder in it when the process ends, with a priority of -100.
    multiprocessing.util.Finalize(None, shutil.rmtree, (own, True), exitpriority=-200)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: one more than cores, because many tests wait for a process that they start."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own findings cache, outside of the folders that it lints."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MPGUARD_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_forced_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a plain shell, also where CI sets them."""
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_module_hooks_left() -> Iterator[None]:
    """Fail a test that leaves hooks on all modules: later tests in this process would run, and compile, with them."""
    yield
    modules = sys.modules.get("torch.nn.modules.module")
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    if modules is not None and any(getattr(modules, f"_global_{kind}_hooks") for kind in kinds):
        tables = [
            each for name, each in vars(modules).items() if name.startswith("_global_") and isinstance(each, dict)
        ]
        left = [repr(value) for table in tables for value in table.values() if callable(value)]
        for table in tables:
            table.clear()
        pytest.fail(f"hooks on all modules are left: {', '.join(left)}")
