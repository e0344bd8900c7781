"""The metadata of installed distributions, read from the folders of `sys.path`.

`importlib.metadata`, which reads the same files, takes 30 ms to import. It is used where a distribution may be in
another place: in an archive, or where a finder of another package finds it.
"""

# Many paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH113, PTH118, PTH208

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from mpguard.core.lazy_pattern import lazy_pattern

_POINT = lazy_pattern(r"^[ \t]*([^\s#=\[][^=\n]*?)[ \t]*=[ \t]*(\S.*?)\s*$", re.MULTILINE)
_NAME = lazy_pattern(r"^Name:[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)


class EntryPoint(NamedTuple):
    """An entry point of a group, and the name of the distribution that it is from."""

    name: str
    value: str
    distribution: str


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group. Of distributions with the same name, the first on `sys.path` counts."""
    if any(os.path.isfile(folder) for folder in sys.path) or any(
        hasattr(finder, "find_distributions") and getattr(finder, "__module__", "") != "_frozen_importlib_external"
        for finder in sys.meta_path
    ):
        import importlib.metadata

        return [
            EntryPoint(each.name, each.value, each.dist.name if each.dist else "an unknown distribution")
            for each in importlib.metadata.entry_points(group=group)
        ]
    found: dict[str, list[EntryPoint]] = {}
    for folder, name in metadata_folders():
        distribution = re.sub(r"[-_.]+", "-", name.rpartition(".")[0].partition("-")[0]).lower()
        if distribution not in found:
            found[distribution] = _points(os.path.join(folder, name), group)
    return [point for points in found.values() for point in points]


def metadata_folders() -> Iterator[tuple[str, str]]:
    """Yield the folders with the metadata of installed distributions: (folder, name)."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in sorted(names):
            if name.endswith((".dist-info", ".egg-info", ".egg", ".egg-link")):
                yield folder, name


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, the first on `sys.path`; None if it is not installed.

    distribution: the name in the form of its folder: `nemo_toolkit`.
    """
    for _, name in metadata_folders():
        found, _, version = name.rpartition(".")[0].partition("-")
        if found.lower() == distribution and version:
            return version.partition("-")[0]  # an egg's name goes on with that of Python
    return None


def entry_points_text(info: str) -> str:
    """Return the `entry_points.txt` of a distribution; empty if it has none."""
    return _read(os.path.join(info, "entry_points.txt")) or _read(os.path.join(info, "EGG-INFO", "entry_points.txt"))


def _points(info: str, group: str) -> list[EntryPoint]:
    text = entry_points_text(info)
    if f"[{group}]" not in text:
        return []
    metadata = _read(os.path.join(info, "METADATA")) or _read(os.path.join(info, "PKG-INFO"))
    named = _NAME.search(metadata)
    distribution = named.group(1) if named else "an unknown distribution"
    section = text.split(f"[{group}]", 1)[1].split("\n[", 1)[0]
    return [EntryPoint(name, value, distribution) for name, value in _POINT.findall(section)]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""
