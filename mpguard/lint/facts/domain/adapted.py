"""Models that get adapters: where, in which order, and under which option."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.program import project_words
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import All, PathCondition, negated
from mpguard.lint.facts.syntax.records import Call, Record

if TYPE_CHECKING:
    from mpguard.lint.facts.domain.view import DomainView

#: Flags of options that add adapters to a model.
_OPTION = lazy_pattern(r"(?i)lora|peft|adapter")


class Adapted:
    """The models of one file that get adapters."""

    def __init__(self, facts: DomainView) -> None:
        self.facts = facts

    def adding(self, key: str, at: Record, cast: bool = False) -> list[Call]:
        """Return the calls that add adapters to an object of this (last) name, in code connected with a record.

        It is an argument, a receiver or a result of the call. cast: the record casts the whole object, with the
        adapters that it got before.
        """
        named = self._by_name.get(key.rsplit(".", 1)[-1], ()) if key else ()
        later = [call for call in named if not (cast and self.precedes(call, at))]
        connected = {
            place
            for place in {call.scope for call in later}
            if at.scope in self.facts.reachable(place) or place in self.facts.reachable(at.scope)
        }
        return [call for call in later if call.scope in connected]

    def are_optional(self, adding: Iterable[Call], at: Record) -> bool:
        """True if an option adds the adapters of a model: without it, all weights are trained."""
        always = self.facts.guard_of(at)
        rest = always
        for call in adding:
            own = PathCondition(self.facts.guard_of(call) - always)
            if (
                not own.flags()
                or not all(map(_OPTION.search, own.flags()))
                or own.flags() & self.facts.module.bindings.keys()
            ):
                return False  # or a constant of the file adds them
            rest = rest.given(negated(All(tuple(own))))
        return rest.possible

    def precedes(self, first: Record, second: Record) -> bool:
        """True if a record comes before another one: in a function, or by the calls of their functions in it."""
        after = self._with_callers(second)
        return any(a.scope is b.scope and a.order < b.order for a in self._with_callers(first) for b in after)

    def _with_callers(self, record: Record, depth: int = 3) -> list[Record]:
        calls = self.facts.callers(record.scope)[:8] if depth else []
        return [record, *(each for call in calls for each in self._with_callers(call, depth - 1))]

    @cached_property
    def _by_name(self) -> dict[str, dict[Call, None]]:
        """The calls of the file that add adapters, by the last names of their objects."""
        found: dict[str, dict[Call, None]] = {}
        for name, calls in self.facts.calls.items():
            adapts = project_words.ADAPTERS.search(name)
            for call in calls if adapts or name == "from_pretrained" else ():
                if not adapts and not project_words.ADAPTER_LOADERS.search(call.path):
                    continue
                given = [call.receiver, *call.positional, call.keywords.get("model")]
                if isinstance(call.statement, cst.Assign):
                    given += [target.target for target in call.statement.targets]
                for each in given:
                    found.setdefault(dotted(each).rsplit(".", 1)[-1], {})[call] = None
        return found
