"""Which names the modules of a tree take from each other: whether anybody may import a name from a file."""

# Thousands of paths are looked at here, which strings do several times faster than Path.
# ruff: noqa: PTH116, PTH118

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.core.tracked_fs import cached_per_run
from mpguard.lint.source.files import NEVER

#: Files of a tree that are searched for imports of a name.
MOST_IMPORTERS = 4000
_COMMENT = re.compile(r"#.*|\\")
_IMPORTS = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^#;(\r\n]*)|import[ \t]+([^#;\r\n]*))", re.MULTILINE
)


def may_take(top: Path, file: Path, name: str) -> bool:
    """Whether another file of a tree may take a name from a file; so it is where the tree is too large.

    By the last name of the module alone (`from x.compat import autocast`): what it says no to, no
    import reaches. A package hands on what its `__init__` imports.
    """
    before = state(str(top)) if tracked_fs.is_recording() else None
    answer = asked(str(top), str(file), name)
    tracked_fs.record("imported", "\0".join((str(top), str(file), name)), [answer, before])
    return answer


def asked(top: str, file: str, name: str) -> bool:
    """The same, without writing down what was looked at."""
    taken = _taken(top)
    stem = Path(file).stem
    if taken is None or stem == "__init__":
        return True
    return bool({name, "*"} & taken.get(stem, set())) or stem in taken[""]


@cached_per_run
def state(top: str) -> str | None:
    """What the statuses of a tree's files say of their contents; None where that is not enough."""
    said: list[str] = []
    for path in _files(top):
        try:
            status = os.stat(path)
        except OSError:  # a broken link
            said.append(path)
            continue
        if not tracked_fs.is_settled(status):
            return None
        said.append(f"{path}\0{tracked_fs.status_of(status)}")
    return tracked_fs.digest("\0".join(said).encode("utf-8", "surrogateescape"))


def _files(top: str) -> Iterator[str]:
    """The Python files of a tree, and one more than `MOST_IMPORTERS` at most."""
    left = MOST_IMPORTERS
    for folder, folders, files in os.walk(top):
        folders[:] = [each for each in folders if each not in NEVER and not each.startswith(".")]
        for file in files:
            if file.endswith(".py"):
                yield os.path.join(folder, file)
                left -= 1
                if left < 0:
                    return


@cached_per_run
def _taken(top: str) -> dict[str, set[str]] | None:
    """Last name of a module -> the names that `from` imports of the tree take from it; under "" what is imported as
    a module, or may be one. None where the tree has more than `MOST_IMPORTERS` files."""
    found: dict[str, set[str]] = {"": set()}
    files = list(_files(top))
    if len(files) > MOST_IMPORTERS:
        return None
    for file in files:
        try:
            text = tracked_fs.read_regular_file(file).decode("utf-8", "replace")
        except OSError:
            continue
        for module, names, modules in _IMPORTS.findall(text):
            listed = _COMMENT.sub("", names).strip("()").split(",") + modules.split(",")
            taken = {each.split()[0].rsplit(".", 1)[-1] for each in listed if each.strip()}
            found.setdefault(module.rsplit(".", 1)[-1], set()).update(taken)
            found[""] |= taken
    return found
