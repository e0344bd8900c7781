"""Digests of trees, by which a later run knows without a search that what it knows about a tree still holds."""

# Thousands of paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH118

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator

from mpguard.core import tracked_fs
from mpguard.core.tracked_fs import cached_per_run
from mpguard.lint.project import tree

#: The most files of a tree that are searched; of a larger one, it is unknown what imports or uses what.
MOST_FILES = 4000
#: Files that no program reads, by their suffixes: pictures, archives, weights, tables.
_DATA = (
    ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".mp4", ".wav", ".gz", ".zip", ".tar", ".pt", ".pth", ".bin",
    ".npy", ".npz", ".pkl", ".csv", ".tsv", ".jsonl", ".ttf", ".woff", ".woff2", ".css", ".js", ".html", ".c", ".cc",
    ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so", ".safetensors", ".onnx", ".parquet", ".h5",
)  # fmt: skip


@cached_per_run
def of_modules(top: str) -> str | None:
    """Return a digest of the statuses of a tree's Python files; None if a status does not prove the content."""
    return _of(modules(top))


@cached_per_run
def of_project(top: str) -> str | None:
    """Return the same for the files of a project that may refer to code."""
    return _of(project_files(top))


def _of(files: Iterable[str]) -> str | None:
    parts: list[str] = []
    for path in files:
        status = tracked_fs.status_in_run(path)
        if status is None:  # a broken link
            parts.append(path)
            continue
        if not tracked_fs.is_settled(status):
            return None
        parts.append(f"{path}\0{tracked_fs.status_of(status)}")
    return tracked_fs.digest("\0".join(parts).encode("utf-8", "surrogateescape"))


def modules(top: str) -> Iterator[str]:
    """Yield the Python files of a tree, at most one more than `MOST_FILES`."""
    found = (os.path.join(folder, file) for folder, files in tree.walk(top) for file in files if file.endswith(".py"))
    yield from itertools.islice(found, MOST_FILES + 1)


@cached_per_run
def project_files(top: str) -> list[str]:
    """Return the files of a project that may refer to code, at most one more than `MOST_FILES`."""
    found: list[str] = []
    for folder, names in tree.walk(top, hidden=(".github",)):
        for name in names:
            if not name.lower().endswith(_DATA):
                found.append(os.path.join(folder, name))
                if len(found) > MOST_FILES:
                    return found
    return found
