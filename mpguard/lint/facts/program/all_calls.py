"""All calls of a function in its project, where every mention of its name is one of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpguard.lint.facts.syntax.records import Call, Scope
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

#: The bindings of a name that are no uses of it.
_DEFINES = frozenset({"def", "class", "from"})


def all_calls(scope: Scope, facts: ProgramView) -> list[Call] | None:
    """Return all calls of a function, or of the class that it initializes; None if there may be others."""
    home = scope.parent if scope.name == "__init__" and scope.is_method else scope
    facts = facts.of(scope)
    if home is None or home.parent is None or home.decorators or scope.decorators or home.name.startswith("__"):
        return None
    if not home.name.startswith("_") and facts.project.is_library(facts.path):
        return None
    users: list[ProgramView] | None = []
    if home.parent.kind == "module":
        users = facts.project.all_users_of(facts.path, home.name)
    elif (
        not (home.is_method and home.parent.parent is not None and home.parent.parent.kind == "module")
        or facts.project.method_used_elsewhere(facts.path, home.name)
        or facts.derived_elsewhere(home.parent)
    ):
        return None
    calls: list[Call] = []
    for each in (facts, *users) if users is not None else ():
        each.need_uses(home.name)
        found = each.graph.calls_of(scope)
        if _mentions(home, each) != len(found):
            return None
        calls += found
    return calls


def _mentions(scope: Scope, facts: ProgramView) -> int:
    """Return how often a file uses a function or class, or its name for something else; imports do not count.

    A part of a module's name (`torch.distributed.fsdp`) is no mention.
    """
    name = scope.name
    called = "" if facts.of(scope) is facts else rf"|(?<=\.){name}(?=\s*\()"
    mention = rf"\b{name}\b" if scope.is_method else rf"(?<![\w.]){name}\b{called}"
    defined = [each for place in facts.scopes for each in place.bindings.get(name, ()) if each.kind in _DEFINES]
    return len(re.findall(mention, stripped(facts.file_text))) - len(defined)
