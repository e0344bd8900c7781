"""Copies of other packages inside of a project, and their examples."""

from __future__ import annotations

import re
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.lint.project import tree
from mpguard.lint.project.packages import is_installable
from mpguard.lint.project.questions.asked import LARGEST, Asked, ask, question, refers

_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
#: Folders of a project's examples.
_EXAMPLES = frozenset({"example", "examples", "research_projects"})


def is_copied_example(file: Path) -> bool:
    """True if a file is an example of another package, of which its project contains a copy, and does not run it."""
    above = list(file.parents)
    place = next((place for place, folder in enumerate(above) if folder.name in _EXAMPLES), None)
    if place is None:
        return False
    for folder in above[place + 1 :]:
        top = next((each for each in folder.parents if tree.is_project(each)), None)
        if top is not None and _is_copy(folder, top):
            return not ask(top, file, _is_run)
    return False


@question
def _is_run(asked: Asked) -> bool:
    return any(refers(each, asked.file, "") and not is_in_copy(Path(each), Path(asked.top)) for each in asked.others)


def is_in_copy(file: Path, top: Path, by_terms: bool = False) -> bool:
    """True if a file is in a copy of another package below the top of a project.

    by_terms: with another kind of license; else one of another holder is enough, which a part of the project may have.
    """
    inner = (each for each in file.parents if each.is_relative_to(top) and each != top)
    return any(_is_copy(each, top) and not (by_terms and _terms(each) == _terms(top)) for each in inner)


def _is_copy(folder: Path, top: Path) -> bool:
    """True if a folder contains a package with another license than its project.

    The project's own package, in a folder such as `python`, may repeat its license.
    """
    own = _license(folder)
    return own is not None and is_installable(folder) and own != _license(top)


def _terms(folder: Path) -> list[bytes]:
    """Return the words of a folder's license without its holder and year: a part of a project has its own."""
    return re.sub(rb"(?im)^.*(?:copyright|\(c\)).*$", b"", _license_text(folder) or b"").split()


def _license(folder: Path) -> list[bytes] | None:
    """Return the words of a folder's license; None if it has none."""
    text = _license_text(folder)
    return None if text is None else text.split()


def _license_text(folder: Path) -> bytes | None:
    found = next((path for name in _LICENSES if tracked_fs.is_file(path := folder / name)), None)
    return None if found is None else tracked_fs.read_up_to(found, LARGEST) or b""
