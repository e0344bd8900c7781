"""The dependencies of all findings: Python, mpguard's own code, and the packages with rules, recipes or plugins."""

# Many paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH118

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from mpguard.core import tracked_fs
from mpguard.core.distributions import entry_points_text, metadata_folders
from mpguard.core.lazy_pattern import lazy_pattern

#: Distributions that parse the files which are linted, and those whose newer versions may know other keys of configs:
#: another version may give other results.
_READERS = lazy_pattern(
    r"(?i)(?:libcst|pyyaml|pathspec|markdown[-_]it[-_]py|packaging"
    r"|accelerate|deepspeed|axolotl|llamafactory|nemo_toolkit)[-.]"
)
_OWN = lazy_pattern(r"(?i)mpguard-")
_VALUE = lazy_pattern(r"^[^\s=\[]+\s*=\s*(\w+)", re.MULTILINE)


def identity() -> str | None:
    """Return a digest that is equal for runs with the same rules; None where that cannot be determined."""
    parts = [sys.version, str(sys.flags.optimize)]
    packages = {"mpguard"}
    other_packages = False
    infos = list(metadata_folders())
    for folder, name in infos:
        if _READERS.match(name):
            parts.append(name)
        points = entry_points_text(os.path.join(folder, name))
        if "[mpguard." in points:
            parts += (name, points)
            other_packages = other_packages or not _OWN.match(name)
            for section in re.findall(r"\[mpguard\.\w+\]([^\[]*)", points):
                packages.update(_VALUE.findall(section))
    if other_packages:  # their rules may use any other package
        parts += sorted(name for _, name in infos)
    for package in sorted(packages):
        files = _sources(package)
        if files is None:
            return None
        for path in files:
            try:
                with open(path, "rb") as file:  # noqa: PTH123
                    parts += (path, tracked_fs.digest(file.read()))
            except OSError:
                return None
    return tracked_fs.digest("\0".join(parts).encode("utf-8", "surrogateescape"))


def _sources(package: str) -> list[str] | None:
    """Return the Python files of a package; None where they cannot be determined."""
    module = sys.modules.get(package)
    places = list(getattr(module, "__path__", ()))
    if not places:
        import importlib.util

        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            return [spec.origin] if spec.origin else None
        places = list(spec.submodule_search_locations)
    return sorted(path for place in places for path in _below(place))


def _below(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _below(entry.path)
