"""Code that nothing in its project uses: modules that are neither imported nor run, and names that nothing reads."""

from __future__ import annotations

import bisect
import functools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.project.questions import uses
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView
    from mpguard.lint.facts.syntax.records import Call
    from mpguard.lint.source.source import Chunk

#: Modules of the standard library whose calls start a program's work.
_RUNS = frozenset(
    {"argparse", "asyncio", "concurrent", "multiprocessing", "runpy", "subprocess", "threading", "unittest"}
)
#: Bases of a class that tell nothing about who uses it.
_COMMON_BASES = frozenset({
    "", "object", "nn.Module", "torch.nn.Module", "Module", "ABC", "Function", "autograd.Function",
    "torch.autograd.Function",
})  # fmt: skip
#: Code that may get a function of its own file by a name that comes from outside.
_BY_NAME = lazy_pattern(r"(?<![\w.])(?:(?:globals|locals|vars)\(\)|eval\()|sys\.modules")
_REGISTERS = lazy_pattern(r"@[\w.]*\bregister\w*\([^()\n]*\)\s")
#: A method in the text of a class.
_METHOD = lazy_pattern(
    r"^(?P<decorated>[ \t]+@[^\n]*\n)?(?P<indent>[ \t]+)(?:async[ \t]+)?def[ \t]+(?P<name>\w+)[ \t]*\(", re.M
)
#: Code that gets an attribute by a name that is not in the code.
_GETS_ATTRIBUTE = lazy_pattern(r"\bgetattr\([^,\n]*,\s*(?![\s\"'])|\b(?:methodcaller|attrgetter)\(")
_MAIN = lazy_pattern(r"if[ \t]*\(?__name__[ \t]*==")
_RANDOM = lazy_pattern(r"\btorch\.(?:rand|randn|randint|ones)\(")
#: Names of functions and objects that give data, or arguments.
_LOADS = lazy_pattern(r"(?i)loader|dataset|\bparse_args\b|\bopen\(|\bargparse\b")
_NO_PARAMETERS = lazy_pattern(r"\A(?:async[ \t]+)?def[ \t]+\w+[ \t]*\([ \t]*\)")
_BASES = lazy_pattern(r"\Aclass[ \t]+\w+[ \t]*\(\s*([^()]*?)\s*\)")
#: A name, and not an attribute or a part of a dotted module: these do not refer to the file's own definitions.
_NAME = lazy_pattern(r"(?<![\w.])[^\W\d]\w*")
_HARMLESS = lazy_pattern(r"torch\.(?:set_|device$|manual_seed$|cuda\.is_available$)")


def is_unused_module(facts: ProgramView) -> bool:
    """True if nothing imports or runs a file: the project does not mention it, and all that it does is to define."""
    stem = Path(facts.path).stem
    return (
        facts.path.endswith(".py")
        and stem not in uses.BY_TOOLS
        and not facts.is_test
        and not facts.may_train
        and all(_is_preparation(call, facts) for call in facts.module.calls)
        and _is_mentioned_nowhere(facts)
    )


def _is_mentioned_nowhere(facts: ProgramView) -> bool:
    """True if nothing in the project launches or imports a file."""
    return not facts.project.launches_of(facts.path) and not facts.project.used_elsewhere(facts.path)


def _is_preparation(call: Call, facts: ProgramView) -> bool:
    """True if a call at the top level of a module prepares, as in `sys.path.append(...)`; scripts call more."""
    path = facts.called_path(call)
    root = path.partition(".")[0]
    return bool(_HARMLESS.match(path)) or (root in sys.stdlib_module_names and root not in _RUNS)


def is_unused_value(call: Call, facts: ProgramView, is_program: bool = False) -> bool:
    """True if a call's result is assigned to a top-level name that neither the file nor its project mentions again.

    In a folder that is no project the same is true for a program, and for a module of which other names are used.
    """
    names = [key for key, bound in facts.module.bindings.items() if any(each.value is call.node for each in bound)]
    if len(names) != 1 or not facts.path.endswith(".py"):
        return False
    if len(re.findall(rf"\b{re.escape(names[0])}\b", stripped(facts.file_text))) != 1:
        return False
    project, path = facts.project, facts.path
    return not project.used_elsewhere(path, names[0]) or project.is_left_over(path, names[0], is_program)


class UnusedDefinitions:
    """The top-level functions and classes of a file that nothing in its project refers to, and trials of a module."""

    def __init__(self, facts: ProgramView) -> None:
        self._facts = facts
        self._chunks = facts.source.chunks
        self._roots: dict[Chunk, bool] = {}

    def contain(self, place: int) -> bool:
        """True if an offset of the file is in one of them."""
        chunk = self._chunks[max(bisect.bisect_right(self._starts, place) - 1, 0)]
        if self._may_use_any:
            return False
        if chunk.defines is None:
            return self._is_trial(chunk) or self._is_unused_import(chunk, place)
        if self._is_unused_method(chunk, place):
            return True
        users = [chunk]
        for each in users:
            if self._is_root(each):
                return False
            users += [user for user in self._chunks if user not in users and each.defines in self._words[user]]
        return True

    def _is_unused_method(self, chunk: Chunk, place: int) -> bool:
        """True in a method that nothing calls, of a class that overrides nothing: its name is nowhere else."""
        bases = _BASES.search(chunk.text)
        if not chunk.text.startswith("class ") or (bases is not None and bases[1] not in ("", "object")):
            return False
        at = max(place - self._facts.source.offset(chunk.start), 0)
        methods = [each for each in _METHOD.finditer(chunk.text[:at]) if each["indent"] == _first_indent(chunk.text)]
        if not methods or methods[-1]["decorated"] or methods[-1]["name"].startswith("__"):
            return False
        if chunk.text[chunk.text.rfind("\n", 0, at) + 1 :].lstrip().startswith("@"):  # of the next method
            return False
        name, path = methods[-1]["name"], self._facts.path
        code = stripped(self._facts.file_text)
        return not (
            re.search(rf"\.\s*{name}\b|[\"']{name}[\"']", code)
            or _GETS_ATTRIBUTE.search(code)
            or (not name.startswith("_") and self._facts.project.is_library(path))
            or self._facts.project.method_used_elsewhere(path, name)
        )

    def _is_unused_import(self, chunk: Chunk, place: int) -> bool:
        """True in an import whose names only unused functions and classes use."""
        facts = self._facts
        names = {
            key
            for key, bindings in facts.module.bindings.items()
            for each in bindings
            if each.kind in ("from", "import") and each.chunk is chunk and each.statement is not None
            and (span := facts.span(each.statement, each))[0] <= place < span[1]
        }  # fmt: skip
        other = {
            use.path.partition(".")[0] for uses in facts.module.uses.values() for use in uses if use.chunk is chunk
        }
        users = [each for each in self._chunks if each is not chunk and names & self._words[each]]
        return (
            bool(users)
            and names.isdisjoint(other)
            and all(each.defines is not None and self.contain(facts.source.offset(each.start)) for each in users)
            and not any(facts.project.used_elsewhere(facts.path, name) for name in names)
        )

    def _is_trial(self, chunk: Chunk) -> bool:
        """True for a trial of a module on random tensors: `if __name__ == "__main__":` in a file that others import."""
        is_main, code = _MAIN.match(chunk.text), stripped(chunk.text)
        return (
            is_main is not None
            and _RANDOM.search(code) is not None
            and not _LOADS.search(code)
            and self._facts.project.used_elsewhere(self._facts.path)
        )

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [self._facts.source.offset(each.start) for each in self._chunks]

    @functools.cached_property
    def _may_use_any(self) -> bool:
        """True if all functions of the file may be used: by a tool, as tests, or by names that are not in the code.

        Or by those who copy them, if the file only defines, and is all the code of its project.
        """
        facts = self._facts
        if Path(facts.path).stem in uses.BY_TOOLS or facts.is_test or _BY_NAME.search(facts.file_text) is not None:
            return True
        only_defines = all(_is_preparation(call, facts) for call in facts.module.calls)
        return only_defines and facts.project.is_all_code(facts.path)

    @functools.cached_property
    def _words(self) -> dict[Chunk, set[str]]:
        return {chunk: set(_NAME.findall(stripped(chunk.text))) for chunk in self._chunks}

    def _is_root(self, chunk: Chunk) -> bool:
        if chunk not in self._roots:
            self._roots[chunk] = self._find_root(chunk)
        return self._roots[chunk]

    def _find_root(self, chunk: Chunk) -> bool:
        """True if a statement runs, or if something outside of the file may use what it defines."""
        name = chunk.defines
        if name is not None and self._is_unregistered(chunk):
            return False
        return (
            name is None
            or name in uses.ENTRIES
            or chunk.text.startswith("@")
            or self._is_public(chunk, name)
            or self._is_looked_up(chunk)
            or self._facts.project.used_elsewhere(self._facts.path, name)
        )

    def _is_unregistered(self, chunk: Chunk) -> bool:
        """True if a decorator that registers a definition never runs, since nothing imports or runs the module."""
        facts = self._facts
        return (
            _REGISTERS.match(chunk.text) is not None
            and not any(call.is_statement and not _is_preparation(call, facts) for call in facts.module.calls)
            and _is_mentioned_nowhere(facts)
            and not facts.project.looked_up(facts.path)
            and not facts.project.asks_for(facts.path, "user-dir")
        )

    def _is_public(self, chunk: Chunk, name: str) -> bool:
        """True if a definition is part of the interface of an installable package; a function needs parameters.

        A function of which the program that imports the module has its own version is left over.
        """
        is_private = name.startswith("_") or _NO_PARAMETERS.search(chunk.text) is not None
        project, path = self._facts.project, self._facts.path
        return not is_private and project.is_library(path) and not project.is_replaced(path, name)

    def _is_looked_up(self, chunk: Chunk) -> bool:
        """True if a class with a base class may be chosen by its name, as a trainer or a model of a registry."""
        bases = _BASES.search(chunk.text)
        is_derived = bases is not None and bases[1] not in _COMMON_BASES
        return is_derived and self._facts.project.looked_up(self._facts.path)


def _first_indent(text: str) -> str:
    """Return the indentation of the body of a class."""
    found = re.search(r"^([ \t]+)(?:@|(?:async[ \t]+)?def\b)", text, re.M)
    return found[1] if found is not None else ""
