"""Branches that no call takes: a function tests a parameter, and all calls of the project pass other constants."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.program.lattice import Object
from mpguard.lint.facts.syntax.nodes import constant, dotted
from mpguard.lint.facts.syntax.path_condition import PathCondition, compatible, equality
from mpguard.lint.facts.syntax.records import Binding, Record, Scope
from mpguard.lint.reachability.unused import UnusedDefinitions
from mpguard.lint.source.strip_comments import stripped
from mpguard.lint.source.text import Unparsable

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

#: How many calls a parameter is followed through: `main(mode="bf16")` calls `build(mode)`, which tests it.
_DEPTH = 3


class UntakenBranches:
    """The branches of a file that no call of the project takes."""

    def __init__(self, facts: ProgramView) -> None:
        self._facts = facts

    def contain(self, place: int) -> bool:
        """True if an offset of the file is in one of them."""
        record = self._record_at(place)
        guards = _guards(record) if record is not None else ()
        try:
            return any(self._is_untaken(scope, guard) for scope, guard in guards if guard and scope.kind == "function")
        except (Unparsable, RecursionError):  # a file that calls the function
            return False

    def _record_at(self, place: int) -> Record | None:
        """Return the smallest record of a function around an offset."""
        source = self._facts.source
        starts = [source.offset(each.start) for each in source.chunks]
        chunk = source.chunks[max(bisect.bisect_right(starts, place) - 1, 0)]
        found: tuple[int, Record] | None = None
        functions = (each for each in self._facts.scopes if each.kind == "function" and each.chunk is chunk)
        for record in _records(functions):
            start, end = record.span
            if start <= place < end and (found is None or end - start < found[0]):
                found = end - start, record
        return found[1] if found is not None else None

    def _is_untaken(self, scope: Scope, guard: PathCondition) -> bool:
        """True if some flag of a path condition in a function has only values that contradict it."""
        for flag in guard.flags():
            values = self._values(flag, scope, _DEPTH)
            if values and not any(compatible(guard.given(equality(flag, value))) for value in values):
                return True
        return False

    def _values(self, name: str, scope: Scope, depth: int) -> list[object] | None:
        """Return the constants that a name in a function may have, by all calls; None if they are not all known."""
        if not name.isidentifier() or depth < 1:
            return None
        bindings, owner = scope.bindings.get(name, []), scope.owner
        is_attribute = any(use.path == f"self.{name}" for use in scope.uses.get("self", ()))
        if is_attribute and owner is not None:
            bindings = [*bindings, *self._facts.of(scope).attributes(owner).get(name, [])]
        if len(bindings) != 1 or _is_another(name, scope):
            return None
        (binding,) = bindings
        if binding.kind == "param":
            return self._passed(binding, depth)
        if binding.kind != "assign" or not is_attribute or self._is_set_outside(name):
            return None
        return self._value(binding.value, binding, depth)

    def _is_set_outside(self, name: str) -> bool:
        """True if code may set an attribute of this name of an object from outside of its methods."""
        return re.search(rf"(?<!\bself)\.{name}\s*=(?!=)|\bsetattr\(", self._facts.file_text) is not None

    def _passed(self, param: Binding, depth: int) -> list[object] | None:
        """Return the constants that all calls of a function in code that is used pass for a parameter."""
        found: list[object] = []
        for call in self._facts.all_calls(param.scope) or ():
            if self._facts.of(call).part(UnusedDefinitions).contain(call.span[0]):
                continue
            given = self._facts.argument_for(call, param)
            values = self._value(given, call if given is not param.value else param, depth)
            if values is None:
                return None
            found += values
        return found or None

    def _value(self, node: cst.BaseExpression | None, at: Record, depth: int) -> list[object] | None:
        """Return the constants that an expression may be: a literal, or a parameter for which only such are passed.

        A GradScaler is as good as True where it is tested.
        """
        literal = constant(node)
        if literal is not None:
            return list(literal)
        path = dotted(node)
        if path and at.scope.kind == "function" and (found := self._values(path, at.scope, depth - 1)) is not None:
            return found
        made = self._facts.of(at).evaluate(node, at) if node is not None else ()
        is_scaler = [isinstance(each.atom, Object) and each.atom.kind == "scaler" for each in made]
        return [True] if is_scaler and all(is_scaler) else None


def _guards(record: Record) -> Iterator[tuple[Scope, PathCondition]]:
    """Yield the functions around a record, each with the path condition of the record in it."""
    guard = record.guard
    for scope in record.scope.within():
        yield scope, guard
        guard = scope.guard


def _records(scopes: Iterator[Scope]) -> Iterator[Record]:
    for scope in scopes:
        bindings = itertools.chain.from_iterable(scope.bindings.values())
        yield from (*scope.calls, *scope.withs, *scope.returns, *scope.exits, *bindings)


def _is_another(name: str, scope: Scope) -> bool:
    """True if a flag of this name may be another object's: a part of it (`args.name`), or an item (`c["name"]`).

    The module `torch.amp` is none.
    """
    text = re.sub(rf"(?<![\w.])self\.{name}\b|\b(?:torch|cuda)\.amp\b", "", stripped(scope.chunk.text))
    return re.search(rf"\.{name}\b|[\"']{name}[\"']", text) is not None
