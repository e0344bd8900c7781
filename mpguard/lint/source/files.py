"""The files of a run: the ones that are named, and those found in the folders that are named.

.gitignore (at all levels, up to the repository's top), `include` and `exclude` apply to files that
are found; named ones are always checked. Only regular files are opened: a FIFO or a device that is
found is skipped, one that is named is refused.
"""

# Thousands of paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH100, PTH114, PTH116, PTH118, PTH122, PTH206

from __future__ import annotations

import dataclasses
import functools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from mpguard.core import settings, tracked_fs
from mpguard.core.errors import did_you_mean_file

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

#: launch: shell scripts, Makefiles, workflows and READMEs, of which only the launch lines are read; markdown: launch
#: lines and blocks of Python.
FileKind = Literal["python", "config", "notebook", "markdown", "launch"]

PYTHON = (".py", ".pyi", ".pyw")
CONFIG = (".yaml", ".yml", ".json")
NOTEBOOK = ".ipynb"
MARKDOWN = (".md", ".markdown")
SHELL = (".sh", ".bash", ".slurm", ".sbatch", ".mk")
MAKEFILES = ("Makefile", "makefile", "GNUmakefile")
READS = "Python (.py), notebooks (.ipynb), YAML (.yaml, .yml), JSON (.json), and launch lines (.sh, Makefile, .md)"
#: Folders without code of the project itself; `exclude` adds to them.
NEVER = frozenset((
    ".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", ".eggs", "node_modules", "site-packages", "__pycache__",
    ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", ".mpguard_cache",
))  # fmt: skip

#: The group of pathspec's regular expressions that ends a match of a folder.
_FOLDER_MARK = "ps_d"
#: The most folders above a file: the search for settings and modules visits each of them.
DEEPEST = 100


@dataclasses.dataclass(frozen=True)
class Target:
    """One file to check.

    path: as the user named it, or as found below a folder that was named; reports show it.
    named: it was named itself; a YAML or JSON that is found and is not a config is not reported.
    data: the content if it is not that of the file (stdin).
    problem: why it cannot be read; it is then reported and not opened.
    """

    path: str
    kind: FileKind
    named: bool = False
    size: int = 0
    data: bytes | None = None
    problem: str | None = None


class _Found(NamedTuple):
    target: Target
    is_link: bool


@dataclasses.dataclass(frozen=True)
class Found:
    """The targets in order; paths that were named and cannot be checked (exit status 2); folders with no such files."""

    targets: tuple[Target, ...]
    refused: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


def collect(paths: Iterable[str], force_exclude: bool = False, include_markdown: bool = False) -> Found:
    """Return the files that `paths` name, each once, in the order of `paths` and then by name.

    force_exclude: treat named files like found ones: `exclude` applies to them too, and a YAML or JSON
    that is not a config is skipped, as is any file that mpguard does not read (for pre-commit,
    which names every file).
    include_markdown: read the blocks of Python in Markdown too.
    """
    targets: dict[str, Target] = {}
    folders: dict[str, str] = {}
    refused: list[str] = []
    empty: list[str] = []
    for given in paths:
        path = os.path.normpath(given)
        try:
            status = os.stat(path)
        except OSError as error:
            near = did_you_mean_file(path) if isinstance(error, FileNotFoundError) else ""
            broken = isinstance(error, FileNotFoundError) and os.path.islink(path)
            refused.append(f"{given}: is a broken link" if broken else f"{given}: {_why(error)}{near}")
            continue
        if why := too_deep(os.path.abspath(path)):
            refused.append(f"{given}: {why}")
            continue
        if stat.S_ISDIR(status.st_mode):
            found = list(_walk(path, force_exclude, include_markdown))
            if not found:
                why = "no Python, YAML or JSON files in this folder, or all are left out by `exclude` or .gitignore"
                empty.append(f"{given}: {why}; nothing was checked there")
        elif not stat.S_ISREG(status.st_mode):
            refused.append(
                f"{given}: is {_what(status.st_mode)}, not a regular file, and is not opened; for stdin give `-`"
            )
            continue
        elif (kind := _named_kind(path, include_markdown)) is None:
            if force_exclude:
                continue
            refused.append(f"{given}: mpguard reads {READS}")
            continue
        elif not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            refused.append(f"{given}: no permission to read it")
            continue
        elif force_exclude and excluded(Path(path)):
            continue
        else:
            found = [_Found(Target(path, kind, named=not force_exclude, size=status.st_size), os.path.islink(path))]
        for target, is_link in found:
            key = _real(target.path, is_link, folders)
            if key not in targets or (target.named and not targets[key].named):
                targets[key] = target
    return Found(tuple(targets.values()), tuple(refused), tuple(empty))


def _real(path: str, is_link: bool, folders: dict[str, str]) -> str:
    """Return a file's path without symbolic links. folders: a cache, so that each is resolved once."""
    folder, name = os.path.split(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    real = os.path.join(folders[folder], name)
    return os.path.realpath(real) if is_link else real


def kind_of(path: str, include_markdown: bool = False) -> FileKind | None:
    """Return the kind of a named file, by its name; one without a suffix is a Python script.

    include_markdown: read blocks of Python in Markdown too.
    """
    folder, name = os.path.split(path)
    suffix = os.path.splitext(name)[1].lower()
    if suffix in CONFIG:
        return "launch" if folder.replace(os.sep, "/").endswith(".github/workflows") and suffix != ".json" else "config"
    if suffix == NOTEBOOK:
        return "notebook"
    if suffix in MARKDOWN:
        return "markdown" if include_markdown else "launch"
    if suffix in SHELL or name in MAKEFILES:
        return "launch"
    return "python" if suffix in PYTHON or not suffix else None


def _named_kind(path: str, include_markdown: bool) -> FileKind | None:
    """Return the kind of a named file; that of a script without a suffix is in its first line."""
    kind = kind_of(os.path.abspath(path), include_markdown)
    if kind == "python" and not os.path.splitext(path)[1]:
        try:
            with Path(path).open("rb") as file:
                first = file.readline(200)
        except OSError:
            return kind  # the check reports that it cannot be read
        if first.startswith(b"#!") and b"python" not in first:
            return "launch" if b"sh" in first else None
    return kind


def _found_kind(folder: str, name: str, include_markdown: bool) -> FileKind | None:
    """Return the kind of a file that is found: without a suffix only a Makefile, of Markdown only a README."""
    if name.endswith(".py") and name[0] != ".":  # as most do
        return "python"
    kind = kind_of(f"{folder}/{name}", include_markdown)
    if kind == "python" and not os.path.splitext(name)[1]:
        return None
    if kind == "launch" and name.lower().endswith(MARKDOWN) and not name.lower().startswith("readme"):
        return None
    return kind


def _why(error: OSError) -> str:
    """Return the reason of an error."""
    reasons = {FileNotFoundError: "no such file or folder", PermissionError: "no permission to read it"}
    return reasons.get(type(error), error.strerror or str(error))


def _what(mode: int) -> str:
    """Return what a file that is not regular is."""
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def _walk(top: str, force_exclude: bool, include_markdown: bool) -> Iterator[_Found]:
    """Yield all files to check below a folder, sorted. Links to folders are not followed, so there are no loops."""
    if force_exclude and excluded(Path(top)):
        return
    yield from _below(top, _outer_ignores(Path(top)), include_markdown)


def too_deep(absolute: str) -> str | None:
    """Return why a path is not read, if it has too many folders."""
    return f"lies below more than {DEEPEST} folders, and is not read" if absolute.count(os.sep) > DEEPEST else None


def _below(folder: str, outer: tuple[_Patterns, ...], include_markdown: bool) -> Iterator[_Found]:
    absolute = os.path.abspath(folder)
    if why := too_deep(absolute):
        yield _Found(Target(folder, "python", problem=f"the folder {why}"), os.path.islink(folder))
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        problem = f"the folder cannot be read: {_why(error)}"
        yield _Found(Target(folder, "python", problem=problem), os.path.islink(folder))
        return
    patterns = _gitignore(folder) if any(entry.name == ".gitignore" for entry in entries) else None
    ignores = (*outer, patterns) if patterns else outer
    configured = _configured(absolute)
    for entry in entries:
        path = entry.name if folder == "." else entry.path
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in NEVER and not _ignored(path, True, ignores) and not configured.excludes(path, True):
                yield from _below(path, ignores, include_markdown)
            continue
        kind = _found_kind(absolute, entry.name, include_markdown)
        if kind is None and not configured.include:
            continue
        if _ignored(path, False, ignores) or configured.excludes(path, False):
            continue
        if configured.include:
            kind = (kind_of(entry.name) or "python") if configured.include.covers(path) else None
        if kind is not None:
            target = _target(entry, path, f"{absolute}/{entry.name}", kind)
            if target is not None:
                yield _Found(target, entry.is_symlink())


def _target(entry: os.DirEntry[str], path: str, absolute: str, kind: FileKind) -> Target | None:
    """Return a file that is found; None for one that is not regular."""
    try:
        status = entry.stat()
    except OSError as error:
        # Editors use broken links as locks (`.#train.py`), and data sets may have broken links to JSON.
        if kind == "python" and not entry.name.startswith(".#"):
            why = "is a broken link" if entry.is_symlink() else f"cannot be read: {_why(error)}"
            return Target(path, kind, problem=f"the file {why}")
        return None
    tracked_fs.note_status(absolute, status)
    return Target(path, kind, size=status.st_size) if stat.S_ISREG(status.st_mode) else None


class _Patterns:
    """Patterns in the syntax of .gitignore that apply below one folder."""

    def __init__(self, root: str, lines: Iterable[str]) -> None:
        self.root = os.path.join(os.path.abspath(root), "")
        self.spec, self.own = _compiled(tuple(lines))

    def match(self, path: str, is_folder: bool) -> bool | None:
        """Return True if a pattern matches the path itself; False if a `!pattern` does; None if none does.

        As in Git, the last pattern wins. A pattern that matches a folder above says nothing of the path: who goes down
        a tree has asked for that folder before. Otherwise `!*/` would bring back all files, and pathspec, where a match
        of a folder counts less than one of a file, would keep the folders out that it brings back.
        """
        name = self._name(path, is_folder)
        return None if name is None else next((include for each, include in self.own if each(name)), None)

    def covers(self, path: str) -> bool:
        """True if a pattern matches a file or a folder above it."""
        name = self._name(path, False)
        return name is not None and bool(self.spec.check_file(name).include)

    def _name(self, path: str, is_folder: bool) -> str | None:
        absolute = os.path.abspath(path)
        if not absolute.startswith(self.root):
            return None
        return absolute[len(self.root) :].replace(os.sep, "/") + ("/" if is_folder else "")


@functools.lru_cache(maxsize=256)
def _compiled(lines: tuple[str, ...]) -> tuple[GitIgnoreSpec, list[tuple[Callable[[str], bool], bool]]]:
    """Return the patterns as pathspec has them, and for each, the last one first, what matches a path itself.

    With it, if it leaves the path out.
    """
    from pathspec import GitIgnoreSpec

    def matcher(regex: re.Pattern[str]) -> Callable[[str], bool]:
        if _FOLDER_MARK not in regex.groupindex:
            # `pkg/**` matches all in a folder, and not the folder.
            return lambda name: (whole := regex.search(name)) is not None and name[whole.end() - 1 :] != "/"
        # The mark is the slash at which the pattern ends; if that is not the last character, a folder above matched.
        return lambda name: any(found.end(_FOLDER_MARK) in (-1, len(name)) for found in regex.finditer(name))

    spec = GitIgnoreSpec.from_lines(lines)
    found = ((each.regex, each.include) for each in reversed([*spec.patterns]))
    return spec, [(matcher(regex), include) for regex, include in found if regex is not None and include is not None]


def matches(patterns: Iterable[str], root: Path, path: str) -> bool:
    """True if a file, or one of the folders above it up to `root`, matches one of the patterns."""
    lines = tuple(patterns)
    if not lines:
        return False
    return _covered(_Patterns(str(root), lines), path, False)


def _covered(patterns: _Patterns, path: str, is_folder: bool) -> bool:
    parts = os.path.abspath(path)[len(patterns.root) :].split(os.sep)
    for depth in range(1, len(parts) + 1):
        inner = depth < len(parts)
        if patterns.match(os.path.join(patterns.root, *parts[:depth]), inner or is_folder):
            return True
    return False


def _ignored(path: str, is_folder: bool, ignores: tuple[_Patterns, ...]) -> bool:
    for patterns in reversed(ignores):
        matched = patterns.match(path, is_folder)
        if matched is not None:
            return matched
    return False


def _gitignore(folder: str) -> _Patterns | None:
    try:
        lines = tracked_fs.read_regular_file(f"{folder}/.gitignore").decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    return _Patterns(folder, lines) if lines else None


def _outer_ignores(top: Path) -> tuple[_Patterns, ...]:
    """Return the .gitignore files above a named folder, up to the repository's top, outermost first.

    If they ignore the folder itself, none of them applies: the user has named it.
    """
    top = top.absolute()
    if tracked_fs.type_of(str(top / ".git")):
        return ()
    ignores: list[_Patterns] = []
    for folder in top.parents:
        patterns = _gitignore(str(folder))
        if patterns is not None:
            ignores.insert(0, patterns)
        if tracked_fs.type_of(str(folder / ".git")):
            break
    else:
        return ()  # not in a repository: only .gitignore files in the folder apply
    inside = [top, *(parent for parent in top.parents if any(str(parent).startswith(p.root) for p in ignores))]
    if any(_ignored(str(folder), True, tuple(ignores)) for folder in inside):
        return ()
    return tuple(ignores)


class _Configured:
    """`include` and `exclude` of the settings that apply in one folder."""

    def __init__(self, found: settings.ToolSettings) -> None:
        self.include = _Patterns(str(found.root), found.include) if found.include else None
        self.exclude = _Patterns(str(found.root), found.exclude) if found.exclude else None

    def excludes(self, path: str, is_folder: bool) -> bool:
        return self.exclude is not None and bool(self.exclude.match(path, is_folder))


def _configured(folder: str) -> _Configured:
    return _Configured(settings.of_folder(folder))


def excluded(path: Path) -> bool:
    """True if `exclude` covers a named path, or a folder above it."""
    found = settings.nearest(path)
    is_folder = tracked_fs.type_of(str(path)) == "folder"
    if found.exclude and _covered(_Patterns(str(found.root), found.exclude), str(path), is_folder):
        return True
    return any(part in NEVER for part in path.absolute().relative_to(found.root).parts)
