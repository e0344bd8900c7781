"""Where values go and what they come from, within one file and within bounds."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.dataflow.backward_flow import Origins
from mpguard.lint.facts.dataflow.forward_flow import Forward, Reach
from mpguard.lint.facts.syntax.path_condition import PathCondition
from mpguard.lint.facts.syntax.records import Binding, Record

if TYPE_CHECKING:
    from mpguard.lint.facts.file import Facts

#: Uses of names, and bindings, that are looked at for one file. Beyond, where a value goes is unknown.
_MOST_USES = 100_000
_MOST_BINDINGS = 2_000_000
_ORDER = operator.attrgetter("order")


class Flow:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.uses_left = _MOST_USES
        self.bindings_left = _MOST_BINDINGS

    @property
    def spent(self) -> bool:
        return self.uses_left <= 0 or self.bindings_left <= 0

    def between(self, bindings: Sequence[Binding], first: int, last: int) -> Sequence[Binding]:
        """Of a scope's bindings of a name, those between two places; they are in order."""
        place = bisect.bisect_right(bindings, first, key=_ORDER)
        between = bindings[place : bisect.bisect_left(bindings, last, place, key=_ORDER)]
        self.bindings_left -= len(between)
        return between

    def forward(self, node: cst.CSTNode, at: Record, guard: PathCondition | None = None) -> Reach:
        """What the value of an expression reaches."""
        return Forward(self.facts, at.guard if guard is None else guard).start(node, at)

    def forward_key(self, key: str, at: Record, guard: PathCondition | None = None) -> Reach:
        """The same for an object that is cast (`model.half()`, `x = x.half()`): the uses of its name from there on."""
        walk = Forward(self.facts, at.guard if guard is None else guard)
        walk.cast = (key, at.scope)
        walk.taint(key, at.scope, at.order)
        return walk.reach

    def backward(self, node: cst.CSTNode, at: Record, depth: int = 6) -> list[Record]:
        """The bindings and calls, in any function of the file, that an expression is computed from."""
        walk = Origins(self.facts)
        walk.expression(node, at.scope, at.order, at.guard, depth)
        return walk.found
