"""Reaching definitions: the bindings that may have set a name at a place."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from mpguard.lint.facts.syntax.path_condition import ALWAYS, PathCondition, compatible
from mpguard.lint.facts.syntax.records import Binding, Scope

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView


class ReachingDefinitions:
    """The reaching definitions of the names of one file."""

    def __init__(self, facts: ProgramView) -> None:
        self.facts = facts
        self._bindings: dict[tuple[Scope, str], tuple[int, list[Binding]]] = {}

    def at(
        self, key: str, scope: Scope, order: int, guard: PathCondition = ALWAYS, most: int = 1 << 60
    ) -> list[Binding]:
        """Return the reaching definitions of a name or `self.` attribute at a place, the latest first.

        At most `most` are returned if that many are enough for the caller.
        """
        if key.startswith("self."):
            local = [b for b in scope.bindings.get(key, ()) if b.order < order and b.kind not in ("item", "del")]
            dominating = [b for b in local if not (b.guard - scope.guard)]
            if dominating and scope.name != "__init__":
                return _reaching_definitions(local, order, guard, most)
            owner = scope.owner
            return self.facts.classes.attributes(owner).get(key[5:], []) if owner is not None else []
        root = key.partition(".")[0]
        for place in scope.chain():
            if place.kind == "module":
                self.facts.need(root)
            if root in place.globals:
                continue
            found = self._value_bindings(place, key)
            if found:
                if place is scope:
                    return _reaching_definitions(found, order, guard, most)
                return _reaching_definitions(found, 1 << 60, guard, most)
        return []

    def _value_bindings(self, scope: Scope, key: str) -> list[Binding]:
        """Return the bindings of a name in a scope that give it a value, in order; cached until the scope has more."""
        bindings = scope.bindings.get(key)
        if bindings is None:
            return []
        known = self._bindings.get((scope, key))
        if known is None or known[0] != len(bindings):
            known = self._bindings[scope, key] = (
                len(bindings),
                [b for b in bindings if b.kind not in ("item", "del")],
            )
        return known[1]


def _reaching_definitions(bindings: list[Binding], order: int, guard: PathCondition, most: int) -> list[Binding]:
    """Return the bindings that reach a place, the latest first: back to one that is always executed."""
    found: list[Binding] = []
    before = bisect.bisect_left(bindings, order, key=lambda binding: binding.order) or len(bindings)
    for place in range(before - 1, -1, -1):
        binding = bindings[place]
        if compatible(binding.guard, guard):
            found.append(binding)
            if len(found) >= most or (
                not (binding.guard - guard - binding.scope.guard) and binding.kind != "augmented"
            ):
                break
    return found
