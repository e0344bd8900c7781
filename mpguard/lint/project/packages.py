"""The packages of a project: what is installed, and what its packages export."""

from __future__ import annotations

import re
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.project import summaries

#: Settings by which setuptools builds what has an `__init__.py` in each folder; pyproject.toml's `find` takes more.
_FINDS_PACKAGES = lazy_pattern(rb"(?<!\w)find_packages\(|^packages[ \t]*=[ \t]*find:", re.M)
_BUILD_FILES = ("setup.py", "setup.cfg", "pyproject.toml")
#: The tables of a pyproject.toml with which a package is built.
_BUILDS = lazy_pattern(rb"^\[(?:project|build-system|tool\.poetry)\]", re.M)


def exports_all(file: Path) -> bool:
    """True if the outermost package of a file re-exports all its names: `from .file import *`, in each package."""
    home = file.parent if file.stem == "__init__" else file
    package = home.parent / "__init__.py"
    if not tracked_fs.is_file(package):
        return False
    stars = {module for module, names in summaries.imports_of(tracked_fs.read(package)) if "*" in names}
    if not any(module.rpartition(".")[2] == home.stem for module in stars):
        return False
    return not tracked_fs.is_file(package.parent.parent / "__init__.py") or exports_all(package)


def builds_from(top: Path, folder: Path) -> bool:
    """True unless a project builds only the packages of other folders than this one.

    That is certain of `find_packages()` of setuptools, which wants an `__init__.py` in each folder, where the settings
    do not name the folder.
    """
    if folder in (top, top / "src"):
        return True
    try:
        settings = b"\n".join(tracked_fs.read(top / name) for name in _BUILD_FILES if tracked_fs.is_file(top / name))
    except OSError:
        return True
    named = re.search(rb"[\"'/=\s]%s(?:[\"'/\s]|$)" % re.escape(folder.name.encode()), settings)
    return named is not None or _FINDS_PACKAGES.search(settings) is None or b"namespace" in settings


def is_installable(top: Path) -> bool:
    """True if a project is built into a package, whose code other projects may use."""
    if any(tracked_fs.exists(top / name) for name in ("setup.py", "setup.cfg")):
        return True
    settings = top / "pyproject.toml"
    return tracked_fs.is_file(settings) and _BUILDS.search(tracked_fs.read(settings)) is not None
