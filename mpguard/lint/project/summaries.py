"""Summaries of modules: what the other files of a tree must know of one before any of it is parsed.

A summary is what a module imports, which classes it derives from, and whether its code may train. From those of a
whole tree follows who uses a name of a file, so that facts can look at callers in other modules: see `Project.users`.
"""

# Thousands of paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH118, PTH120

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.tracked_fs import cached_per_run
from mpguard.lint.project import tree, tree_state
from mpguard.lint.source.test_paths import is_test
from mpguard.lint.source.token_search import TokenSearch

#: The most files that use a name, and how often packages may re-export it; beyond that it is unknown who uses it.
MOST_USERS, MOST_PACKAGES = 8, 3
_PACKAGE = "/__init__.py"
#: The most searches of a tree for what may import a file, and an import by dots alone: `from .. import x`.
_MOST_PASSES = 3
_DOTS = lazy_pattern(rb"from[ \t]+\.+[ \t\\(]*import")
#: Words of code that trains, or that decides in which dtype other code runs. A file without any of them that uses a
#: function decides nothing about its precision.
_TRAINS = TokenSearch((
    b".backward(", b".step(", b"autocast", b"caler", b"torch.optim", b"import optim", b"ptimizer(", b"train(",
    b"train_one", b"fit(", b".prepare(", b"Trainer(", b"deepspeed.", b"float16 if ",
))  # fmt: skip
#: Packages that are no part of a tree, unless it has a folder or a module of that name.
LIBRARIES = frozenset({"torch", "numpy", "os", "sys", "typing", "transformers", "torchvision", "collections", "re"})
#: Kinds of questions.
_IMPORTS, _DERIVES, _USES = "", "class ", "use "
#: Both begin with a newline, which makes the search three times as fast as `^` does.
_BASES = lazy_pattern(rb"\n[ \t]*class[ \t]+\w+[ \t]*\(([^()]*)\)[ \t]*:")
IMPORT = lazy_pattern(
    rb"\n[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\((?:[^()#]|#[^\n]*)*\)|(?:[^#;(\r\n\\]|\\\n*)*)"
    rb"|import[ \t]+([^#;\r\n]*))"
)
_COMMENT = lazy_pattern(r"#.*|\\")

#: The answer to a question: True or False, or paths.
Answer = bool | list[str] | None
Imports = tuple[tuple[str, frozenset[str]], ...]


class ModuleSummary(NamedTuple):
    """What a tree must know of one module.

    imports: (module, names): `from module import names`; without names `import module`. bases: the last names of the
    base classes of its classes. trains: it may train, or decide in which dtype other code runs.
    """

    imports: Imports
    bases: frozenset[str]
    trains: bool


@cached_per_run
def imported_files(path: str) -> list[str]:
    """Return the files of the modules of the tree that a file imports."""
    try:
        return files_imported_by(tracked_fs.read(path), path)
    except OSError:
        return []


def files_imported_by(data: bytes, path: str) -> list[str]:
    """Return the same for a file with this content."""
    found = dict[str, None]()
    for module, names in imports_of(data):
        if module.partition(".")[0] in LIBRARIES:
            continue
        file = tree.file_of(module, path)
        if file is not None:
            found[file] = None
        if file is None or file.endswith("__init__.py"):
            inner = (tree.file_of(f"{module}{'' if module.endswith('.') else '.'}{name}", path) for name in names)
            found.update(dict.fromkeys(each for each in inner if each is not None))
    return list(found)


def summarize(data: bytes) -> ModuleSummary:
    """Return the summary of a module. Text in strings counts as code: a summary says what may be."""
    text = _searchable(data)
    bases = {base.rpartition(".")[2] for found in _BASES.findall(text) for base in _names(found)}
    return ModuleSummary(_imports(text), frozenset(bases), trains(text))


def imports_of(data: bytes) -> Imports:
    """Return only what a module imports; see `ModuleSummary`."""
    return _imports(_searchable(data))


def _searchable(data: bytes) -> bytes:
    """Return code in which each line follows a newline."""
    return b"\n" + data.replace(b"\r", b"\n") if b"\r" in data else b"\n" + data


def _imports(text: bytes) -> Imports:
    imports: dict[str, set[str]] = {}
    whole = dict[str, None]()
    for module, names, modules in IMPORT.findall(text):
        if module:
            imports.setdefault(module.decode(), set()).update(_names(names))
        whole.update(dict.fromkeys(_names(modules)))
    return (
        *((module, frozenset(names)) for module, names in imports.items()),
        *((each, frozenset()) for each in whole),
    )


def trains(data: bytes) -> bool:
    """True if a module may train, or decide in which dtype other code runs."""
    return bool(_TRAINS.found_in(data))


def _names(listed: bytes) -> Iterator[str]:
    """Yield the names in a list of imports or base classes, without what they are renamed to."""
    text = listed.decode("utf-8", "replace")
    for each in (_COMMENT.sub("", text) if "#" in text or "\\" in text else text).strip("()").split(","):
        if words := each.split():
            yield words[0]


# -- questions ----------------------------------------------------------------------------------------


def may_import(top: Path, file: Path, name: str) -> bool:
    """True if another file of a tree may import a name from a file, or the tree is too large to search.

    Only the last name of the module is compared (`from x.compat import autocast`), so that False is
    certain. A package re-exports what its `__init__` imports.
    """
    return bool(_asked(top, file, _IMPORTS + name))


def may_derive(top: Path, file: Path, name: str) -> bool:
    """True if a class of another file of a tree may derive from a class of a file."""
    return bool(_asked(top, file, _DERIVES + name))


def users(top: Path, file: Path, name: str) -> list[str] | None:
    """Return the files of a tree that import a name of a file, or the file as a module, and may train.

    Without a name: those that import any of its names. None if there are too many, or the tree is too large: then the
    callers of a function are not known. Tests are no users of what they test.
    """
    found = _asked(top, file, _USES + name)
    return found if isinstance(found, list) else None


def _asked(top: Path, file: Path, question: str) -> Answer:
    return tracked_fs.answered("imported", answer, tree_state.of_modules, (str(top), str(file), question))


def answer(top: str, file: str, question: str) -> Answer:
    """Answer a question, without recording what was read."""
    kind = next(kind for kind in (_DERIVES, _USES, _IMPORTS) if question.startswith(kind))
    name = question.removeprefix(kind)
    if kind is _USES:
        return _users(top, file, name)
    taken = _imported_names(top)
    stem = Path(file).stem
    if taken is not None and kind is _DERIVES and name not in taken[_DERIVES]:
        return False
    if taken is None or stem == "__init__":
        return True
    return bool({name, "*"} & taken.get(stem, set())) or stem in taken[""]


@cached_per_run
def _imported_names(top: str) -> dict[str, set[str]] | None:
    """Return last name of a module -> the names that the tree imports from it.

    Under "" are the names that are imported as a module, or may be one; under `_DERIVES` the last names of base
    classes. None if the tree has too many files.
    """
    found: dict[str, set[str]] = {"": set(), _DERIVES: set()}
    summaries = _summaries(top)
    if summaries is None:
        return None
    for summary in summaries.values():
        found[_DERIVES] |= summary.bases
        for module, names in summary.imports:
            last = module.rpartition(".")[2]
            taken = names or {last}
            found.setdefault(last if names else "", set()).update(taken)
            found[""] |= taken
    return found


class _Importer(NamedTuple):
    """A file that may train, or the `__init__` of a package, and the names that it imports; without any, the module."""

    path: str
    names: frozenset[str]
    trains: bool


@cached_per_run
def _importers(top: str) -> dict[str, list[_Importer]] | None:
    """Return file -> the files of a tree that import it, or names of it, and may train or re-export them.

    None if the tree has too many files.
    """
    summaries = _summaries(top)
    if summaries is None:
        return None
    found: dict[str, list[_Importer]] = {}
    for file, summary in summaries.items():
        if not summary.trains and not file.endswith(_PACKAGE):
            continue
        for target, names in _targets(summary, file, top, summaries):
            if target != file:
                found.setdefault(target, []).append(_Importer(file, names, summary.trains))
    return found


@dataclasses.dataclass
class _Searches:
    """What a run has searched a tree for: module -> the files that may import it. passes: over all files."""

    found: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    passes: int = 0


@cached_per_run
def _searches(top: str) -> _Searches:  # noqa: ARG001
    return _Searches()


def _importers_of(top: str, file: str) -> Iterable[_Importer] | None:
    """Return what `_importers` has for one file.

    A run over few files asks this for few of a tree: the others are then searched for the module's name, and summarized
    one after another, as long as the caller goes on. Where many are asked, summaries of all are cheaper.
    """
    files, searches = _files(top), _searches(top)
    if files is None:
        return None
    if file not in searches.found and searches.passes < _MOST_PASSES and not _kept:
        searches.passes += 1
        searches.found.update(_mentioning(file, files))
    if file in searches.found:
        return _search(searches.found[file], top, file)
    found = _importers(top)
    return found.get(file, ()) if found is not None else None


def _mentioning(file: str, files: frozenset[str]) -> dict[str, list[str]]:
    """Return the files that may import a module, and those for the packages it is in, which may re-export it.

    They have its name, or for a package are in it and import from one above by dots alone. Tests are left out where
    they count as no users: in many projects they are half of the code.
    """
    found: dict[str, list[str]] = {file: []}
    folder = os.path.dirname(file)
    while (package := f"{folder}{_PACKAGE}") in files and len(found) <= MOST_PACKAGES:
        found.setdefault(package, [])
        folder = os.path.dirname(folder)
    asked = []
    for module, its in found.items():
        above, name = os.path.split(module)
        is_package = name == _PACKAGE[1:]
        word = Path(above).name if is_package else name.removesuffix(".py")
        by_name = not (is_package and word in LIBRARIES)  # absolute imports of these are not followed
        asked.append((word.encode("utf-8", "surrogateescape") if by_name else None, above if is_package else None, its))
    of_tests = any(map(is_test, found))
    for each in sorted(files):
        if not of_tests and is_test(each):
            continue
        data = _content(each)
        for searched, inside, its in asked:
            if (searched is not None and searched in data) or (
                inside is not None and each.startswith(inside) and _DOTS.search(data) is not None
            ):
                its.append(each)
    return found


def _content(file: str) -> bytes:
    try:
        return tracked_fs.read_regular_file(file)
    except OSError:
        return b""


def _search(mentioning: Iterable[str], top: str, file: str) -> Iterator[_Importer]:
    for path in mentioning:
        if path != file:
            yield from _imports_in(path, top).get(file, ())


@cached_per_run
def _imports_in(path: str, top: str) -> dict[str, list[_Importer]]:
    """Return file -> what a module imports of it; nothing of a module that neither may train nor is a package."""
    data = _content(path)
    decides = trains(_searchable(data))
    if not decides and not path.endswith(_PACKAGE):
        return {}
    found: dict[str, list[_Importer]] = {}
    summary = ModuleSummary(imports_of(data), frozenset(), decides)
    for target, names in _targets(summary, path, top, _files(top) or frozenset()):
        found.setdefault(target, []).append(_Importer(path, names, decides))
    return found


@cached_per_run
def _files(top: str) -> frozenset[str] | None:
    """Return the Python files of a tree; None if it has too many."""
    files = frozenset(tree_state.modules(top))
    return files if len(files) <= tree_state.MOST_FILES else None


@cached_per_run
def _summaries(top: str) -> dict[str, ModuleSummary] | None:
    """Return file -> the summary of each file of a tree that can be read; None if it has too many."""
    files = list(tree_state.modules(top))
    if len(files) > tree_state.MOST_FILES:
        return None
    return {file: summary for file in files if (summary := of_file(file)) is not None}


#: Summaries that a process with several runs keeps, and that its workers share: file -> its status, and its summary.
_kept: dict[str, tuple[tracked_fs.Status, ModuleSummary]] = {}


def of_file(file: str) -> ModuleSummary | None:
    """Return the summary of a file; None if it cannot be read."""
    status = tracked_fs.status_in_run(file)
    if status is None:
        return None
    now = tracked_fs.status_of(status)
    is_overlaid = tracked_fs.is_overlaid(file)
    if file in _kept and _kept[file][0] == now and not is_overlaid:
        return _kept[file][1]
    try:
        found = summarize(tracked_fs.read_regular_file(file))
    except OSError:
        return None
    if tracked_fs.is_settled(status) and not is_overlaid:
        _kept[file] = now, found
    return found


def to_keep(files: Iterable[str]) -> list[str]:
    """Return those of some files whose summaries a later run can take over: their statuses prove their contents."""
    return [
        file
        for file in files
        if not tracked_fs.is_overlaid(file)
        and (status := tracked_fs.status_in_run(file)) is not None
        and tracked_fs.is_settled(status)
    ]


def keep(summaries: Mapping[str, ModuleSummary | None]) -> None:
    """Keep summaries that other processes have made of files that `to_keep` returned before."""
    for file, summary in summaries.items():
        status = tracked_fs.status_in_run(file)
        if summary is not None and status is not None:
            _kept[file] = tracked_fs.status_of(status), summary


def _targets(
    summary: ModuleSummary, file: str, top: str, known: Container[str]
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the known files that a module imports, each with the names that it takes from it; see `tree.file_of`."""
    folder = os.path.dirname(file)
    above = [folder]
    while above[-1] != top and len(above[-1]) > len(top):
        above.append(os.path.dirname(above[-1]))
    bases = [*above, os.path.join(top, "src")]
    for module, names in summary.imports:
        inside = module.lstrip(".")
        dots = len(module) - len(inside)
        if inside.partition(".")[0] in LIBRARIES and not dots:
            continue
        for base in above[dots - 1 : dots] if dots else bases:
            place = os.path.join(base, *inside.split(".")) if inside else base
            found = next((each for each in (f"{place}.py", f"{place}{_PACKAGE}") if each in known), None)
            inner = [each for name in names if (each := _inner(place, name, known))]
            yield from ((each, frozenset()) for each in inner)
            if found is not None:
                yield found, names
            if found is not None or inner:
                break


def _inner(place: str, name: str, known: Container[str]) -> str | None:
    """Return the file of a module that is imported from a package by its name."""
    return next((each for each in (f"{place}/{name}.py", f"{place}/{name}{_PACKAGE}") if each in known), None)


def _users(top: str, file: str, name: str, depth: int = MOST_PACKAGES) -> list[str] | None:
    importers = _importers_of(top, file)
    if importers is None:
        return None
    found = set[str]()
    for path, names, decides in importers:
        if (is_test(path) and not is_test(file)) or (name and names and not names & {name, "*"}):
            continue
        if decides:
            found.add(path)
        if depth and path.endswith(_PACKAGE):
            further = _users(top, path, name, depth - 1)
            if further is None:
                return None
            found.update(further)
        if len(found) > MOST_USERS + 1:
            return None
    found.discard(file)
    return sorted(found) if len(found) <= MOST_USERS else None
