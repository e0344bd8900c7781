"""DeepSpeed's operator for collectives on the CPU: compiled once, before a test that has a time limit needs it.

DeepSpeed compiles it at the first run on a machine (about a minute on two cores, several on a slow one). A test that is
killed meanwhile leaves torch's lock file behind, for which every later run of the same user waits without end.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpguard.runtime.launch.build_locks import extensions_folder, stale_locks

_BUILD = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()
"""


#: What a test module imports to start processes, and what it names where these run DeepSpeed.
_STARTS_PROCESSES = re.compile(r"^(?:from|import) (?:processes|stock)\b", re.M)
_NAMES_DEEPSPEED = re.compile(r"deepspeed|\bzero[123]\b", re.I)
_STAMP = "mpguard/deepspeed_operator"


def needed_by(module: Path) -> bool:
    """True if tests of a module start processes in which DeepSpeed may run."""
    text = module.read_text("utf-8")
    return bool(_STARTS_PROCESSES.search(text) and _NAMES_DEEPSPEED.search(text))


def compile_once(config: pytest.Config) -> None:
    """Compile the operator if it is not there; other workers wait. Raise `RuntimeError` as `build` does."""
    if not is_installed():
        return
    folder = extensions_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tests.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache, stamp = getattr(config, "cache", None), version()
        if cache is not None and cache.get(_STAMP, None) == stamp and is_compiled():
            return
        build(lambda message: print(message, file=sys.__stderr__, flush=True))
        if cache is not None:
            cache.set(_STAMP, stamp)


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("deepspeed", "torch"))


def version() -> str:
    """What a compiled operator is good for: its stamp."""
    names = ("deepspeed", "torch")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return " ".join([sys.version, *versions, str(extensions_folder())])


def is_compiled() -> bool:
    """True if a compiled operator is there. Its stamp alone does not prove that."""
    return any(extensions_folder().glob("*/*.so"))


def build(report: Callable[[str], None]) -> None:
    """Compile the operator, or load it if it is there. Raise `RuntimeError` for a stale lock, or if the build fails."""
    if stale := stale_locks():
        raise RuntimeError(
            "these build locks belong to no running process (a build was killed), and every run that needs the "
            f"extension waits for them without end; remove them: rm {' '.join(map(str, stale))}"
        )
    report("compiling DeepSpeed's operator for the CPU, once: a minute or more")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", _BUILD], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"DeepSpeed's operator does not compile here:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
