"""Build locks of torch extensions that nobody holds any more.

torch compiles an extension (DeepSpeed's operators among them) at its first use, under a lock file in the build folder
(`torch.utils.file_baton`). A process that is killed meanwhile leaves the file behind; each later process that needs the
extension then waits for it without a limit and without a message. Workers of mpguard write their machine into the
lock, so the launcher removes what its workers leave behind, also if torchelastic or a second signal has killed them.
Since torch 2.14 the kernel holds the lock (`torch.utils._filelock`): its file stays after a build, and blocks no other.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

#: The lock file's name in each build folder: `torch.utils.cpp_extension`, unchanged from torch 1.2 to 2.14.
LOCK = "lock"

#: No build of an extension takes that long: DeepSpeed's take minutes.
BUILD_SECONDS = 3600


def extensions_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of all builds: `TORCH_EXTENSIONS_DIR`, else torch's default below the user's cache.

    environment: the variables; by default those of this process.
    """
    environment = os.environ if environment is None else environment
    given = environment.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def _machine() -> str:
    """Return what a worker writes into its lock: the machine, and in a container the container."""
    processes = Path("/proc/self/ns/pid")
    return f"mpguard {platform.node()} {processes.readlink() if processes.is_symlink() else ''}"


def sign(lock: str) -> None:
    """Write into a lock of this process on which machine it is held."""
    with contextlib.suppress(OSError):
        Path(lock).write_text(_machine(), encoding="utf-8")


def remove_own() -> None:
    """Remove stale locks that processes of mpguard have left behind on this machine."""
    for lock in stale_locks():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if lock.read_text(encoding="utf-8") == _machine():
                lock.unlink()


def abandoned_locks(folder: Path | None = None) -> list[Path]:
    """Return the stale locks that are older than any build takes: a process that cannot be seen may hold a younger one.

    It may run in another container, or on another machine that shares the folder.
    """
    return [lock for lock in stale_locks(folder) if time.time() - _modified(lock) > BUILD_SECONDS]


def _modified(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except OSError:  # it was released meanwhile
        return time.time()


def held_by_the_kernel() -> bool:
    """Return True if a lock of the installed torch ends with its process."""
    try:
        return Version(importlib.metadata.version("torch")).release >= (2, 14)
    except importlib.metadata.PackageNotFoundError:
        return False


def stale_locks(folder: Path | None = None) -> list[Path]:
    """Return the build locks that no running process holds, sorted.

    folder: of all builds; by default `extensions_folder()`. A process that builds keeps its lock open, so a lock that
    no process has open is stale. Processes of other users cannot be read: a lock of another user counts as held.
    Without /proc (not Linux) nothing is known, and the list is empty. It is empty with torch 2.14 and later, too.
    """
    if held_by_the_kernel():
        return []
    folder = extensions_folder() if folder is None else folder
    locks = [path for pattern in (LOCK, f"*/{LOCK}", f"*/*/{LOCK}") for path in folder.glob(pattern) if path.is_file()]
    if not locks or not sys.platform.startswith("linux"):
        return []
    held = _open_files()
    own = os.getuid()
    return sorted(path for path in locks if _owner(path) == own and os.path.realpath(path) not in held)


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:  # it was released meanwhile
        return None


def _open_files() -> set[str]:
    """Return the files that the processes which this user may read have open."""
    found = set()
    for links in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for link in links.iterdir():
                with contextlib.suppress(OSError):  # the file was closed meanwhile
                    found.add(str(link.readlink()))
    return found
