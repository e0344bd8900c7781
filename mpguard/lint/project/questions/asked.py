"""What a question about a project is asked of: all its files, their contents, and which of them use which.

Every file of the project counts: Python code, in which imports are resolved, and strings; notebooks, configs, shell
scripts, the code in Markdown, and other text. What cannot be resolved counts as a use. Answers are recorded for the
cache of findings with a digest of the tree.
"""

# Thousands of paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH119, PTH120

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.tracked_fs import cached_per_run
from mpguard.lint.project import summaries, tree, tree_state
from mpguard.lint.source.files import MARKDOWN, NOTEBOOK, PYTHON
from mpguard.lint.source.strip_comments import stripped
from mpguard.lint.source.test_paths import is_unit_test

#: The size in bytes above which a file that is not Python is data or a log.
LARGEST = 512 << 10
#: What Markdown has of commands and code: blocks, indented or fenced, and spans.
_MARKDOWN_CODE = lazy_pattern(rb"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]+`|^(?: {4}|\t)[^\n]*", re.DOTALL | re.M)


class Asked(NamedTuple):
    """What a question is about: a project, one of its files or none, a name, and all files of the project."""

    top: str
    file: str
    name: str
    files: list[str]

    @property
    def others(self) -> list[str]:
        return [each for each in self.files if each != self.file]

    @property
    def code(self) -> list[str]:
        """The Python files and the notebooks."""
        return [each for each in self.files if each.endswith((*PYTHON, NOTEBOOK))]

    @property
    def other_code(self) -> list[str]:
        """The Python files and the notebooks other than the file."""
        return [each for each in self.code if each != self.file]

    @property
    def other_python(self) -> list[str]:
        """The Python files other than the file."""
        return [each for each in self.others if each.endswith(PYTHON)]

    @property
    def texts(self) -> list[str]:
        """All files that are not Python."""
        return [each for each in self.files if not each.endswith(PYTHON)]

    def is_test(self, user: str) -> bool:
        """True if a file tests another one that is no test: what only tests use is in no program."""
        return user.endswith(PYTHON) and self._is_test(user) and not self._is_test(self.file)

    def _is_test(self, file: str) -> bool:
        return is_unit_test(os.path.relpath(file, self.top), content(file))

    def pattern(self, before: bytes, after: bytes = b"", flags: int = 0) -> re.Pattern[bytes]:
        """Return a pattern with the name in it."""
        return re.compile(before + re.escape(self.name.encode()) + after, flags)


Question = Callable[[Asked], "bool | list[str]"]
#: The questions by their names, and those that are about the whole project, whatever the file.
_QUESTIONS: dict[str, Question] = {}
_OF_PROJECT: set[str] = set()


def question(function: Question) -> Question:
    """Register a question about a file of a project, and perhaps a name."""
    _QUESTIONS[function.__name__] = function
    return function


def question_of_project(function: Question) -> Question:
    """Register a question about a whole project, and perhaps a name."""
    _OF_PROJECT.add(function.__name__)
    return question(function)


def answered(top: Path | str, file: Path | str, asked: Question, name: str = "") -> object:
    """Answer a question and record the answer."""
    of = "" if asked.__name__ in _OF_PROJECT else str(file)
    where = (str(top), of, f"{asked.__name__} {name}")
    return tracked_fs.answered("referenced", answer, tree_state.of_project, where)


def ask(top: Path | str, file: Path | str, asked: Question, name: str = "") -> bool:
    """True if the answer to a question is yes, or not empty; also if the project is too large to search."""
    return bool(answered(top, file, asked, name))


@cached_per_run
def answer(top: str, file: str, question: str) -> bool | list[str]:
    """Answer a question, without recording what was read. question: its name, and the name that it is about."""
    with tracked_fs.untracked():
        files = tree_state.project_files(top)
        if len(files) > tree_state.MOST_FILES:
            return True
        kind, _, name = question.partition(" ")
        return _QUESTIONS[kind](Asked(top, file, name, files))


def content(file: str) -> bytes:
    """Return the content of a file; empty for one that cannot be read, or is data."""
    try:
        if not file.endswith(PYTHON) and (tracked_fs.size_of(file) or 0) > LARGEST and not file.endswith(NOTEBOOK):
            return b""
        return _cells(file) if file.endswith(NOTEBOOK) else tracked_fs.read_regular_file(file)
    except OSError:
        return b""


@cached_per_run
def _cells(notebook: str) -> bytes:
    """Return the code and text of a notebook's cells, without what they printed. Raises `OSError`."""
    data = tracked_fs.read_regular_file(notebook)
    try:
        return "\n".join("".join(cell["source"]) for cell in json.loads(data)["cells"]).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return data


def word_of(name: bytes) -> re.Pattern[bytes]:
    """Return the pattern of a name as a whole word."""
    return re.compile(rb"\b%s\b" % re.escape(name))


def refers(user: str, file: str, name: str) -> bool:
    """True if one file may use a top-level name of another one; without a name, the other file itself."""
    data = content(user)
    wanted = (name or module_name(file)).encode()
    if wanted not in data:
        return False
    word = word_of(wanted)
    if word.search(data) is None:
        return False
    if user.endswith(PYTHON):
        code = stripped(data)
        if word.search(code) is None or (name and _only_imports(code, wanted, word)):
            return False
        return _code_uses(code, user, file, name)
    if user.lower().endswith(MARKDOWN):
        return any(word.search(part) for part in _MARKDOWN_CODE.findall(data))
    # A folder of a module's name in a path is not the module.
    return bool(name) or re.search(rb"\b%s\b(?!/)" % re.escape(wanted), data) is not None


def _only_imports(code: bytes, name: bytes, word: re.Pattern[bytes]) -> bool:
    """True if code imports a name under this name and does nothing with it.

    A package that passes it on is no user: those that take it from the package are.
    """
    if re.search(rb"\b%s\s+as\b" % re.escape(name), code):
        return False
    return word.search(summaries.IMPORT.sub(b"", b"\n" + code)) is None


def _code_uses(code: bytes, user: str, file: str, name: str) -> bool:
    """True if code that contains a name, or without a name that of a file, may mean the one of that file by it."""
    imports = summaries.imports_of(code)
    extended = b"sys.path" in code
    explicit = [module for module, names in imports if name in names]
    modules = [module for module, names in imports if not (name and names) or "*" in names]
    inner = [_inner(module, each) for module, names in imports for each in names]
    named = (*explicit, *modules, *inner)
    if any(_may_be(module, user, file, extended) for module in named):
        return True
    if name and any(_imports(tree.file_of(module, user), name) for module in named):
        return True  # of a module that takes it from the file, perhaps
    wanted = re.escape((name or module_name(file)).encode())
    if explicit or (name and re.search(rb"^(?:(?:async[ \t]+)?def|class)[ \t]+%s\b" % wanted, code, re.M)):
        return False
    return re.search(rb"[\"'](?:[\w./-]*[.:/])?%s(?:\.py)?[\"']" % wanted, code) is not None


def _imports(file: str | None, name: str) -> bool:
    """True if a module imports a name from another one."""
    return file is not None and any(name in names for _, names in summaries.imports_of(content(file)))


def _inner(package: str, name: str) -> str:
    """Return the submodule that `from package import name` may import."""
    return f"{package}{'' if package.endswith('.') else '.'}{name}"


def module_name(file: str) -> str:
    """Return the last name of the module that a file is."""
    folder, name = os.path.split(file)
    stem = name.partition(".")[0]
    return os.path.basename(folder) if stem == "__init__" else stem


def _may_be(module: str, user: str, file: str, extended: bool) -> bool:
    """True if a module that a file imports may be another file, or a package that takes names from that file.

    extended: the importing code changes where modules are searched.
    """
    last = module.rpartition(".")[2]
    found = tree.file_of(module, user)
    if found == file:
        return True
    if found is not None and found.endswith("__init__.py") and file.startswith(os.path.dirname(found) + os.sep):
        return True
    if found is not None and not extended:
        return False
    places = {module_name(file), *Path(file).parts[:-1]}
    root = module.partition(".")[0]
    is_library = root in summaries.LIBRARIES or root in sys.stdlib_module_names
    return last in places and (root in places or not is_library)
