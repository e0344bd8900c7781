"""Forward and backward data flow, with limits on the work per file."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.lint.facts.behaviour.backward_flow import BackwardFlow
from mpguard.lint.facts.behaviour.forward_flow import ForwardFlow, Reach
from mpguard.lint.facts.syntax.path_condition import PathCondition
from mpguard.lint.facts.syntax.records import BY_ORDER, Binding, Record

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: Uses of names, and bindings, that are visited for one file. Beyond these limits the flow of a value is unknown.
_MAX_USES = 100_000
_MAX_BINDINGS = 2_000_000


class Flow:
    """The data flow of one file."""

    def __init__(self, facts: BehaviourView) -> None:
        self.facts = facts
        self.uses_left = _MAX_USES
        self.bindings_left = _MAX_BINDINGS

    @property
    def exhausted(self) -> bool:
        """True if a limit is reached."""
        return self.uses_left <= 0 or self.bindings_left <= 0

    def between(self, bindings: Sequence[Binding], first: int, last: int) -> Sequence[Binding]:
        """Return the bindings of a scope's name between two places; they are in order."""
        place = bisect.bisect_right(bindings, first, key=BY_ORDER)
        between = bindings[place : bisect.bisect_left(bindings, last, place, key=BY_ORDER)]
        self.bindings_left -= len(between)
        return between

    def forward(
        self,
        node: cst.CSTNode,
        at: Record,
        guard: PathCondition | None = None,
        past_targets: bool = True,
        past_models: bool = True,
    ) -> Reach:
        """Return the sinks that the value of an expression reaches.

        past_targets: also through a loss of which the value is the target. past_models: also through the models that
        take it, and through casts to FP32.
        """
        guard = at.guard if guard is None else guard
        return ForwardFlow(self.facts.of(at), guard, past_targets, past_models).start(node, at)

    def forward_key(
        self,
        key: str,
        at: Record,
        guard: PathCondition | None = None,
        past_targets: bool = True,
        past_models: bool = True,
    ) -> Reach:
        """Return the sinks of an object that is cast under a name (`model.half()`, `x = x.half()`).

        The uses of the name are followed from there on.
        """
        walk = ForwardFlow(self.facts.of(at), at.guard if guard is None else guard, past_targets, past_models)
        walk.cast = (key, at.scope)
        walk.taint(key, at.scope, at.order)
        return walk.reach

    def backward(self, node: cst.CSTNode, at: Record, depth: int = 6) -> list[Record]:
        """Return the bindings and calls, in any function of the file, that an expression is computed from."""
        walk = BackwardFlow(self.facts.of(at))
        walk.expression(node, at.scope, at.order, at.guard, depth)
        return walk.found
