"""The tree that a file is in: its top, and the files of its modules."""

# Many paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH117, PTH118

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.core.tracked_fs import cached_per_run
from mpguard.lint.source.files import NEVER

#: Folders that the user has named, in and above which nothing marks a project.
_named = set[Path]()


def use_named(paths: Iterable[str]) -> None:
    """Take the folders among `paths` that are in no project as whole programs from now on: see `is_whole`."""
    folders = {Path(path).absolute() for path in paths if tracked_fs.type_of(path) == "folder"}
    alone = {each for each in folders if not any(is_project(above) for above in (each, *each.parents))}
    _named.clear()
    _named.update(each for each in alone if alone.isdisjoint(each.parents))


def named() -> list[str]:
    """Return the folders that `use_named` has taken as whole programs, sorted."""
    return sorted(map(str, _named))


def file_of(module: str, from_path: str) -> str | None:
    """Return the file of a module, searched from the importing file's folder up to the tree's top."""
    folder = Path(from_path).absolute().parent
    top = top_of(folder)
    dots = len(module) - len(module.lstrip("."))
    parts = [part for part in module[dots:].split(".") if part]
    if not all(part.isidentifier() for part in parts):
        return None
    above = [folder, *folder.parents]
    inside = above[: above.index(top) + 1]
    if dots:
        bases = inside[dots - 1 : dots]
    else:
        bases = [*inside, top / "src"]
        if parts and parts[0] == top.name and tracked_fs.is_file(top / "__init__.py"):
            bases.append(top.parent)
    for base in bases:
        module_file = os.path.join(base, *parts)
        for candidate in (f"{module_file}.py", os.path.join(module_file, "__init__.py")):
            if (parts or candidate.endswith("__init__.py")) and tracked_fs.is_file(candidate):
                return candidate if os.path.isabs(from_path) else os.path.relpath(candidate)
    return None


@cached_per_run
def top_of(folder: Path) -> Path:
    """Return the top of the tree that a folder is in: see `Project.source_of`."""
    for candidate in (folder, *folder.parents):
        if candidate.name in NEVER:
            break  # an installed package: the packages next to it are not part of its tree
        if is_whole(candidate):
            return candidate
    top = folder
    while tracked_fs.is_file(top.parent / "__init__.py"):
        top = top.parent
    return top


@cached_per_run
def outermost(folder: Path) -> Path:
    """Return the top of the tree that a folder is in, or that of the project which contains that tree as a copy.

    A repository of its own (`.git`, as of a submodule) is no copy.
    """
    top = top_of(folder)
    for candidate in top.parents:
        if tracked_fs.exists(top / ".git") or candidate.name in NEVER:
            break
        if is_project(candidate):
            top = candidate
    return top


def is_project(folder: Path) -> bool:
    """True if a folder is the top of a project, and not of an installed package, or any folder."""
    return any(tracked_fs.exists(folder / name) for name in ("pyproject.toml", "mpguard.toml", ".git"))


def is_whole(folder: Path) -> bool:
    """True if all callers of its code are in a folder: it is a project, or the user has named it and it is in none.

    Otherwise findings would depend on a `.git` around the files. That nothing uses a function, or that nothing binds a
    name, is no evidence in a folder that is no project: it may contain snippets.
    """
    return folder in _named or is_project(folder)


def walk(top: str, hidden: Collection[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder of a tree, from the top, with the names of its files, sorted.

    Links to folders, folders of installed packages and hidden folders are left out. hidden: hidden folders to enter.
    Not by `os.walk`, which recurses before Python 3.12: folders can be deeper than the stack.
    """
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        folders: list[str] = []
        files: list[str] = []
        for entry in entries:
            if not _is_folder(entry):
                files.append(entry.name)
            elif not entry.is_symlink() and entry.name not in NEVER and (entry.name[0] != "." or entry.name in hidden):
                folders.append(entry.path)
        waiting += reversed(folders)
        yield folder, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
