"""Tracked access to the file system: each access that findings depend on is recorded, with its result.

A finding in one file may depend on others: on modules that it imports, configs, launch lines, requirements, settings,
and on files that do *not* exist. Code that reads the file system for a linted file uses these functions, so that the
cache can repeat each access and detect a change. Nothing is recorded outside of `recording`.
"""

# Thousands of paths are examined here, and strings are several times faster than Path.
# ruff: noqa: PTH100, PTH116, PTH208

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

try:
    from _blake2 import blake2b  # hashlib also imports OpenSSL, which takes 5 ms
except ImportError:  # _blake2 is an implementation detail of CPython
    from hashlib import blake2b

T = TypeVar("T")

#: The kind of an access (`file`, `type`, `names`, ...), and the path.
Key = tuple[str, str]
#: The result of an access: plain data, as in JSON.
Seen = Any
#: The part of a file's status that changes with its content: times of change, size, inode.
Status = tuple[int, int, int, int]

#: The result of an access whose result changed while it was recorded; no real result equals it.
CHANGED = "changed"
#: A status younger than this does not prove that the content is unchanged: timestamps have a resolution, which is two
#: seconds on some file systems.
SETTLED_NS = 2_000_000_000

_recording = False
#: The records that are being written, the innermost last.
_open: list[dict[Key, Seen]] = []
#: Linted file, or module -> what it depends on.
_of: dict[str, dict[Key, Seen]] = {}
#: Linted file -> modules whose records it depends on too.
_uses: dict[str, set[str]] = {}
_contents: dict[str, tuple[Status, str]] = {}
#: The statuses that this run has seen.
_statuses: dict[str, os.stat_result | None] = {}
_overlay: dict[str, bytes] = {}
#: How files are opened: without waiting, for a FIFO until there is a writer, and on Windows without a change of lines.
_READS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclasses.dataclass(frozen=True)
class Accesses:
    """What findings depend on.

    accesses: each access and its result. contents: files that were read, with status and digest, if the status is old
    enough (`is_settled`).
    """

    accesses: dict[Key, Seen]
    contents: dict[str, tuple[Status, str]]


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record accesses within this context."""
    global _recording  # noqa: PLW0603
    forget()
    _recording = True
    try:
        yield
    finally:
        _recording = False
        forget()


def is_recording() -> bool:
    """True within `recording`."""
    return _recording


def forget() -> None:
    """Discard everything that was recorded."""
    for each in (_of, _uses, _contents, _statuses):
        each.clear()


@contextlib.contextmanager
def recording_for(path: str) -> Iterator[None]:
    """Record accesses within this context as dependencies of a linted file, or of a module."""
    if not _recording:
        yield
        return
    _open.append(_of.setdefault(path, {}))
    try:
        yield
    finally:
        _open.pop()


@contextlib.contextmanager
def untracked() -> Iterator[None]:
    """Do not record accesses within this context: the caller records the result that it derives from them."""
    _open.append({})
    try:
        yield
    finally:
        _open.pop()


def add_dependency(path: str, module: str) -> None:
    """Add the dependencies of a module to those of a linted file."""
    if _recording:
        _uses.setdefault(path, set()).add(module)


def trace(path: str) -> Accesses | None:
    """Return what a file's findings depend on; None outside of `recording`."""
    if not _recording:
        return None
    read = dict(_contents)
    _contents.clear()
    return Accesses(_dependencies(path), read)


def _dependencies(path: str) -> dict[Key, Seen]:
    found: dict[Key, Seen] = {}
    files = [path]
    for file in files:
        _merge(found, _of.get(file, {}))
        files += _uses.get(file, set()).difference(files)
    return found


class TrackedCache(Generic[T]):
    """Like `functools.cache`; a cached result is recorded with the accesses that it was computed from.

    So every file whose findings use the result depends on these accesses, not only the first one.
    """

    def __init__(self, function: Callable[..., T]) -> None:
        self._function = function
        self._results: dict[tuple[Any, ...], tuple[T, dict[Key, Seen]]] = {}
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> T:
        cached = self._results.get(arguments)
        if cached is None:
            inner: dict[Key, Seen] = {}
            _open.append(inner)
            try:
                cached = self._results[arguments] = self._function(*arguments), inner
            finally:
                _open.pop()
                if _open:
                    _merge(_open[-1], inner)
        elif _open:
            _merge(_open[-1], cached[1])
        return cached[0]

    def cache_clear(self) -> None:
        """Discard all results."""
        self._results.clear()


_RUN_CACHES: list[TrackedCache[object]] = []


def cached_per_run(function: Callable[..., T]) -> TrackedCache[T]:
    """Cache a function whose result depends on files, as `functools.cache` does, until `clear_run_caches`."""
    cache = TrackedCache(function)
    _RUN_CACHES.append(cache)  # type: ignore[arg-type]
    return cache


def clear_run_caches() -> None:
    """Clear all caches of `cached_per_run`. A process with several runs (server, watch mode) calls it between them."""
    for cache in _RUN_CACHES:
        cache.cache_clear()
    forget()


def record(what: str, where: str, seen: Seen) -> None:
    """Record an access, or a query that was computed from accesses, and its result."""
    if _recording and _open:
        _merge(_open[-1], {(what, where): seen})


def answered(
    what: str, answer: Callable[[str, str, str], T], state: Callable[[str], str | None], where: tuple[str, str, str]
) -> T:
    """Answer a question about the files of a tree, and record it with its answer as one access.

    where: the folder of the tree, a file and the question, as `answer` takes them. state: returns a digest of the tree,
    by which a later run sees that the answer is the same.
    """
    before = state(where[0]) if is_recording() else None
    found = answer(*where)
    record(what, "\0".join(where), [found, before])
    return found


def _merge(into: dict[Key, Seen], accesses: dict[Key, Seen]) -> None:
    for key, seen in accesses.items():
        if into.setdefault(key, seen) != seen:
            into[key] = CHANGED


# -- recorded accesses ------------------------------------------------------------------------------


def overlay(files: Mapping[str, bytes]) -> None:
    """Replace the contents of files, by absolute path, with what an editor has open and has not saved."""
    _overlay.clear()
    _overlay.update(files)


def is_overlaid(path: str) -> bool:
    """True if an editor has a file open and has not saved it."""
    return bool(_overlay) and os.path.abspath(path) in _overlay


def read_regular_file(path: str | Path) -> bytes:
    """Return the content of a regular file. Raises `OSError`, also for a FIFO or a device, which might never end."""
    if _overlay and (data := _overlay.get(os.path.abspath(path))) is not None:
        return data
    # By the system's calls: a run over one file of a large project reads thousands, and `open` takes 1.5 times as long.
    file = os.open(path, os.O_RDONLY | _READS)
    try:
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is a FIFO or a device, not a regular file, and is not read", str(path))
        data = part = os.read(file, status.st_size + 1)
        while part and len(data) != status.st_size:  # it grows while it is read, or is larger than one read may be
            part = os.read(file, 1 << 20)
            data += part
        return data
    finally:
        os.close(file)


def read(path: str | Path) -> bytes:
    """Return the content of a file. Raises `OSError`."""
    if not _recording:
        return read_regular_file(path)
    absolute = os.path.abspath(path)
    try:
        before = os.stat(absolute)
        data = read_regular_file(absolute)
    except OSError:
        record("file", absolute, None)
        raise
    content_digest = digest(data)
    if is_settled(before):
        _contents[absolute] = status_of(before), content_digest
    record("file", absolute, content_digest)
    return data


def read_up_to(path: str | Path, most: int) -> bytes | None:
    """Return the content of a file; None if it has more than `most` bytes. Raises `OSError`."""
    return read(path) if (size(path) or 0) <= most else None


def size(path: str | Path) -> int | None:
    """Return the size of a file in bytes; None if it does not exist."""
    absolute = os.path.abspath(path)
    seen = size_of(absolute)
    record("size", absolute, seen)
    return seen


def is_file(path: str | Path) -> bool:
    """True if a path is a regular file."""
    absolute = os.path.abspath(path)
    seen = type_of(absolute)
    record("type", absolute, seen)
    return seen == "file"


def exists(path: str | Path) -> bool:
    """True if a path exists."""
    absolute = os.path.abspath(path)
    seen = type_of(absolute)
    record("type", absolute, seen)
    return seen is not None


def list_names(folder: str | Path, endings: tuple[str, ...]) -> list[str]:
    """Return the sorted names in a folder that have one of the endings; empty if it cannot be listed."""
    absolute = os.path.abspath(folder)
    found = names_in(absolute, endings)
    record("names", "\0".join((absolute, *endings)), names_digest(found))
    return found


def real_path(path: str | Path) -> str:
    """Return a path without symbolic links."""
    absolute = os.path.abspath(path)
    seen = os.path.realpath(absolute)
    record("real", absolute, seen)
    return seen


# -- accesses that are not recorded -------------------------------------------------------------------


def status_in_run(path: str) -> os.stat_result | None:
    """Return the status that a path had when this run first asked for it; None if it did not exist.

    For what compares a tree with an earlier run: files are read, and written, with the status of that moment.
    """
    if path not in _statuses:
        _statuses[path] = _status(path)
    return _statuses[path]


def note_status(path: str, status: os.stat_result) -> None:
    """Keep a status for `status_in_run`, if accesses are recorded."""
    if _recording:
        _statuses.setdefault(path, status)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


def size_of(path: str) -> int | None:
    """Return the size of a file in bytes; None if it does not exist."""
    return size_in(_status(path))


def size_in(status: os.stat_result | None) -> int | None:
    """Return the size of a file with this status; None if it does not exist."""
    return None if status is None else status.st_size


def type_of(path: str) -> str | None:
    """Return `file`, `folder` or `other`; None if the path does not exist."""
    return type_in(_status(path))


def type_in(status: os.stat_result | None) -> str | None:
    """Return the same for a status."""
    if status is None:
        return None
    mode = status.st_mode
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def names_in(folder: str, endings: Iterable[str]) -> list[str]:
    """Return the sorted names in a folder that have one of the endings; empty if it cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(tuple(endings)))
    except OSError:
        return []


def names_digest(found: Iterable[str]) -> str:
    return digest("\0".join(found).encode("utf-8", "surrogateescape"))


def status_of(status: os.stat_result) -> Status:
    """Return the part of a status that changes with the file's content."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def is_settled(status: os.stat_result) -> bool:
    """True if any later change to the file must change its status; False for a status from the future."""
    return max(status.st_mtime_ns, status.st_ctime_ns) + SETTLED_NS < time.time_ns()


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
