"""Distributions of other people, as pip leaves them in a folder that is on the path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def install(
    site: Path,
    modules: str | Mapping[str, str],
    package: str = "their_rules",
    groups: Sequence[str] = ("mpguard.rules",),
    value: str | None = None,
) -> Path:
    """Installs a distribution `theirs` that brings a package through entry points; returns its dist-info.

    modules: texts by file name, or that of its `__init__.py` alone. value: what entry points name, if not the package.
    """
    for name, text in ({"__init__.py": modules} if isinstance(modules, str) else modules).items():
        path = site / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = site / "theirs-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    entries = (f"[{group}]\ntheirs = {value or package}\n" for group in groups)
    (info / "entry_points.txt").write_text("".join(entries))
    return info
