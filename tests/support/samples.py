"""Real code to read: the source files of installed packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def package_files(*names: str) -> list[Path]:
    """Return the Python files of the first of these packages that is installed, sorted."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            return sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.py"))
    raise LookupError(f"none of these packages is installed: {', '.join(names)}")
