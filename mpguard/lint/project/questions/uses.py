"""Questions about the functions, classes and attributes of a file: do other files of its project use them?

A definition that nothing refers to does not run.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.project import summaries
from mpguard.lint.project.packages import is_installable
from mpguard.lint.project.questions.asked import Asked, ask, content, question, question_of_project, refers, word_of
from mpguard.lint.source.files import PYTHON
from mpguard.lint.source.strip_comments import stripped

#: Code that may get a class by a name that comes from outside.
_BY_NAME = lazy_pattern(rb"\bimport_module\b|\b__import__\b|\b__subclasses__\b|\bpydoc\.locate\b|\bglobals\(\)")
#: The same, and more ways to get a function or a class that no code names.
_DYNAMIC = lazy_pattern(
    _BY_NAME.pattern + rb"|\b__(?:init_)?subclass(?:es)?__|\b__dict__\b|\b__bases__\b|\bmetaclass[ \t]*="
    rb"|\blocate\(|\b(?:globals|locals|vars)\(|\b(?:methodcaller|attrgetter)\("
    rb"|\bgetattr\([^,]{0,200},\s*(?![\s\"'])|\bgetattr\([^,]{0,200},\s*[\"'][^\"']*[\"']\s*[^\s,)]"
    rb"|\bgetmembers\b|\brun_(?:path|module)\b|\b\w*(?:Fire|CLI)\(|(?<![\w.])(?:eval|exec)\(|\bsys\.modules\b"
    rb"|\binstantiate\(|\bimport[ \t]*\*"
)
#: Functions that a launcher calls by their names.
ENTRIES = frozenset({"main", "_mp_fn"})
#: Modules that tools import by their names.
BY_TOOLS = frozenset({"__init__", "__main__", "conftest", "hubconf", "setup", "sitecustomize", "usercustomize"})
#: Where a top-level statement begins: with its decorators, and without lines that close a bracket.
_STATEMENT = lazy_pattern(rb"\n(?=[^\s)\]}#])(?<!\\\n)")
_HEADER = lazy_pattern(
    rb"(?:async[ \t]+)?(?:def|class)[ \t]+\w+[ \t]*(?:\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))?[^:\n]*:"
)
_DEFINED = lazy_pattern(rb"(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)")


@question
def may_use(asked: Asked) -> bool:
    """True if another file of a project may use a top-level name of a file; without a name, the file itself.

    Tests do not count.
    """
    users = (each for each in asked.others if refers(each, asked.file, asked.name) and not asked.is_test(each))
    first = next(users, None)
    if first is None or not asked.name or is_installable(Path(asked.top)) or ask(asked.top, asked.file, is_dynamic):
        return first is not None
    return not _are_unused(asked, [first, *users])


@question
def users(asked: Asked) -> list[str]:
    """Return the other files of a project that may use a top-level name of a file; None if it is too large to search.

    Those that only mention the name, as a config or a README, are among them.
    """
    return [each for each in asked.others if refers(each, asked.file, asked.name)]


@question_of_project
def may_look_up(asked: Asked) -> bool:
    """True if code of a project may get a class by a name that is not in the code."""
    return any(_BY_NAME.search(content(each)) for each in asked.files if each.endswith(PYTHON))


@question
def may_call(asked: Asked) -> bool:
    """True if another file of a project may use a method of a class of a file, by its name."""
    return any(_may_call(each, asked.name.encode()) for each in asked.others)


@question
def may_set_from_outside(asked: Asked) -> bool:
    """True if a file that uses another one assigns to an attribute of this name, of an object other than `self`."""
    assigned = asked.pattern(rb"(?<![\w.])(?!self\b|cls\b)\w[\w.]*\.", rb"[ \t]*=(?!=)")
    code = asked.other_code
    return any(assigned.search(stripped(content(each))) and refers(each, asked.file, "") for each in code)


@question
def may_mention(asked: Asked) -> bool:
    """True if code below a folder, other than a file's, contains a name."""
    name, _, folder = asked.name.partition(" ")
    word = word_of(name.encode())
    code = (each for each in asked.other_code if Path(each).is_relative_to(folder))
    return any(word.search(stripped(content(each))) for each in code)


@question
def may_give(asked: Asked) -> bool:
    """True if another file of a project gives something a keyword argument or an item of this name."""
    given = asked.pattern(rb"\b", rb"\b[ \t]*=(?!=)").pattern + b"|" + asked.pattern(rb"[\"'](?:--)?", rb"\b").pattern
    return any(re.search(given, stripped(content(each))) for each in asked.other_code)


@question
def is_replaced(asked: Asked) -> bool:
    """True if another file that imports a module has its own definition of a function of this name."""
    defined = asked.pattern(rb"^def[ \t]+", rb"[ \t]*\(", re.M)
    return any(defined.search(content(each)) and refers(each, asked.file, "") for each in asked.other_python)


@question
def is_all_code(asked: Asked) -> bool:
    """True if a file is the only Python file of a project, which has no notebook either."""
    return not asked.other_code


@question_of_project
def is_dynamic(asked: Asked) -> bool:
    """True if code of a project may get a function or a class that no code names."""
    return any(_DYNAMIC.search(content(each)) for each in asked.code)


def _may_call(user: str, method: bytes) -> bool:
    """True if a file may use a method of a class elsewhere; a class that uses its own of this name does not."""
    data = content(user)
    if method not in data:
        return False
    word = re.escape(method)
    if not user.endswith(PYTHON):
        return re.search(rb"\b%s\b" % word, data) is not None
    code = stripped(data)
    if re.search(rb"^[ \t]+(?:async[ \t]+)?def[ \t]+%s\b" % word, code, re.M):
        code = re.sub(rb"\bself\.%s\b" % word, b"", code)
    return re.search(rb"\.\s*%s\b|[\"']%s[\"']" % (word, word), code) is not None


def _are_unused(asked: Asked, users: list[str]) -> bool:
    """True if only functions and classes of other files mention a name which nothing in the project mentions.

    That is known in a program that gets nothing by a name which is not in the code; a library has other users.
    """
    if not all(each.endswith(PYTHON) for each in users):
        return False
    python = [each for each in asked.files if each.endswith(PYTHON)]

    def mentions(name: str) -> list[str]:
        plain = name.encode()
        word = word_of(plain)
        found = (each for each in python if plain in content(each) and word.search(_without_imports(each)))
        return [each for each in found if not asked.is_test(each)]

    def is_unused(user: str, name: str) -> bool:
        return (
            name not in ENTRIES
            and Path(user).stem not in BY_TOOLS
            and mentions(name) == [user]
            and not any(refers(each, user, name) for each in asked.texts)
        )

    others = [each for each in mentions(asked.name) if each not in (asked.file, *users)]
    return not others and all(
        (names := _definitions_with(_without_imports(each), asked.name))
        and all(is_unused(each, name) for name in names)
        for each in users
    )


def _without_imports(file: str) -> bytes:
    """Return a file's code without comments and imports; one under another name, and one of all names, stays."""
    code = b"\n" + stripped(content(file))
    return summaries.IMPORT.sub(lambda found: found[0] if re.search(rb"\bas\b|\*", found[0]) else b"", code)


def _definitions_with(code: bytes, name: str) -> list[str]:
    """Return the top-level functions and classes that mention a name; none if other code of a file mentions it.

    Other code is also a definition that a decorator may pass on, or that more code of the file mentions.
    """
    word = word_of(name.encode())
    found = []
    parts = [b"", *_STATEMENT.split(code)]
    for before, part in itertools.pairwise(parts):
        if word.search(part):
            defined = _DEFINED.match(part)
            if defined is None or before.startswith(b"@") or len(word_of(defined[1]).findall(code)) != 1:
                return []
            if word.search(_run_at_import(part)):
                return []
            found.append(defined[1].decode())
    return found


def _run_at_import(definition: bytes) -> bytes:
    """Return what runs when a function or a class is defined: its header, and the statements of a class's body."""
    header = _HEADER.match(definition)
    if header is None:
        return definition
    body = definition[header.end() :]
    if not definition.startswith(b"class"):
        return header[0]
    indentation = re.search(rb"\n([ \t]+)\S", body)
    lines = [line for line in body.split(b"\n") if indentation and re.match(rb"%s\S" % indentation[1], line)]
    methods = [(line, _HEADER.match(line.lstrip())) for line in lines]
    return b"\n".join((header[0], *(line if found is None else found[0] for line, found in methods)))
