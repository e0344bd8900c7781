"""What findings rest on: each look at the file system is written down, with what was seen.

A finding in one file may rest on others: on modules that it imports, configs, launch lines, requirements, settings,
and on files that are *not* there. Who looks on behalf of a linted file does it here, so that the cache can look again
and see whether anything has changed. Nothing is written down before `recording` is entered.
"""

# Thousands of paths are looked at here, which strings do several times faster than Path.
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
    from _blake2 import blake2b  # hashlib imports OpenSSL too, which takes 5 ms
except ImportError:  # an implementation detail of CPython
    from hashlib import blake2b

T = TypeVar("T")

#: What was looked for (`file`, `type`, `names`, ...), and where.
Key = tuple[str, str]
#: Plain data, as JSON has it.
Seen = Any
#: What a file's status says of its content: times of change, size, inode.
Status = tuple[int, int, int, int]

#: Stands for what changed while it was looked at; nothing equals it.
CHANGED = "changed"
#: A status younger than this says little: clocks and file systems tick, some in steps of two seconds.
SETTLED_NS = 2_000_000_000

_recording = False
_open: list[dict[Key, Seen]] = []
_of: dict[str, dict[Key, Seen]] = {}
_uses: dict[str, set[str]] = {}
_contents: dict[str, tuple[Status, str]] = {}
_instead: dict[str, bytes] = {}


@dataclasses.dataclass(frozen=True)
class Trace:
    """What findings rest on. contents: files that were read, with status and digest; those whose status says enough."""

    looks: dict[Key, Seen]
    contents: dict[str, tuple[Status, str]]


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Within it, looks are written down."""
    global _recording  # noqa: PLW0603
    forget()
    _recording = True
    try:
        yield
    finally:
        _recording = False
        forget()


def is_recording() -> bool:
    return _recording


def forget() -> None:
    """Drops what was written down."""
    for each in (_of, _uses, _contents):
        each.clear()


@contextlib.contextmanager
def recording_for(path: str) -> Iterator[None]:
    """Within it, looks are taken for the findings in a file, or for what is known of a module."""
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
    """Within it, looks are not written down: the answer that they lead to is."""
    _open.append({})
    try:
        yield
    finally:
        _open.pop()


def add_dependency(path: str, module: str) -> None:
    """What a file's findings rest on includes what was looked at for a module."""
    if _recording:
        _uses.setdefault(path, set()).add(module)


def trace(path: str) -> Trace | None:
    """What a file's findings rest on; None where nothing was written down."""
    if not _recording:
        return None
    read = dict(_contents)
    _contents.clear()
    return Trace(_taken_for(path), read)


def _taken_for(path: str) -> dict[Key, Seen]:
    found: dict[Key, Seen] = {}
    files = [path]
    for file in files:
        _merge(found, _of.get(file, {}))
        files += _uses.get(file, set()).difference(files)
    return found


class TrackedCache(Generic[T]):
    """As `functools.cache`; what is remembered counts as looked at again, on whose behalf it may be."""

    def __init__(self, function: Callable[..., T]) -> None:
        self._function = function
        self._known: dict[tuple[Any, ...], tuple[T, dict[Key, Seen]]] = {}
        functools.update_wrapper(self, function)

    def __call__(self, *given: Any) -> T:
        known = self._known.get(given)
        if known is None:
            inner: dict[Key, Seen] = {}
            _open.append(inner)
            try:
                known = self._known[given] = self._function(*given), inner
            finally:
                _open.pop()
                if _open:
                    _merge(_open[-1], inner)
        elif _open:
            _merge(_open[-1], known[1])
        return known[0]

    def cache_clear(self) -> None:
        self._known.clear()


_RUN_CACHES: list[TrackedCache[object]] = []


def cached_per_run(function: Callable[..., T]) -> TrackedCache[T]:
    """Cache a function whose result depends on files, as `functools.cache` does, until `clear_run_caches`."""
    cache = TrackedCache(function)
    _RUN_CACHES.append(cache)  # type: ignore[arg-type]
    return cache


def clear_run_caches() -> None:
    """Clear everything that was cached per run. A process that outlives a run (server, watch mode) calls it between."""
    for cache in _RUN_CACHES:
        cache.cache_clear()
    forget()


def record(what: str, where: str, seen: Seen) -> None:
    """Writes down what was seen, or answered."""
    if _recording and _open:
        _merge(_open[-1], {(what, where): seen})


def _merge(into: dict[Key, Seen], looks: dict[Key, Seen]) -> None:
    for key, seen in looks.items():
        if into.setdefault(key, seen) != seen:
            into[key] = CHANGED


# -- looks ------------------------------------------------------------------------------------------


def overlay(files: Mapping[str, bytes]) -> None:
    """From here on these contents are what absolute paths hold: what an editor has open and not saved."""
    _instead.clear()
    _instead.update(files)


def read_regular_file(path: str | Path) -> bytes:
    """What is in a regular file. Raises `OSError`, for a FIFO or a device too, which might never end."""
    if _instead and (data := _instead.get(os.path.abspath(path))) is not None:
        return data
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is a FIFO or a device, not a regular file, and is not read", str(path))
        return file.read()


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read(path: str | Path) -> bytes:
    """The content of a file. Raises `OSError`."""
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
    """The content of a file; None where it is longer than that. Raises `OSError`."""
    return read(path) if (size(path) or 0) <= most else None


def size(path: str | Path) -> int | None:
    """The size of a file; None where there is none."""
    absolute = os.path.abspath(path)
    seen = size_of(absolute)
    record("size", absolute, seen)
    return seen


def is_file(path: str | Path) -> bool:
    absolute = os.path.abspath(path)
    seen = type_of(absolute)
    record("type", absolute, seen)
    return seen == "file"


def exists(path: str | Path) -> bool:
    absolute = os.path.abspath(path)
    seen = type_of(absolute)
    record("type", absolute, seen)
    return seen is not None


def list_names(folder: str | Path, endings: tuple[str, ...]) -> list[str]:
    """The names in a folder with one of some endings, sorted; none where it cannot be listed."""
    absolute = os.path.abspath(folder)
    found = names_in(absolute, endings)
    record("names", "\0".join((absolute, *endings)), names_digest(found))
    return found


def real_path(path: str | Path) -> str:
    """A path without symbolic links."""
    absolute = os.path.abspath(path)
    seen = os.path.realpath(absolute)
    record("real", absolute, seen)
    return seen


# -- the same without writing it down -----------------------------------------------------------------


def size_of(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return None


def type_of(path: str) -> str | None:
    """`file`, `folder` or `other`; None where nothing is there."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def names_in(folder: str, endings: Iterable[str]) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(tuple(endings)))
    except OSError:
        return []


def names_digest(found: Iterable[str]) -> str:
    return digest("\0".join(found).encode("utf-8", "surrogateescape"))


def status_of(status: os.stat_result) -> Status:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def is_settled(status: os.stat_result) -> bool:
    """Whether a later change to the file is bound to change its status; not so for one from the future."""
    return max(status.st_mtime_ns, status.st_ctime_ns) + SETTLED_NS < time.time_ns()


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
