"""Events of autocast regions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint.facts.behaviour.events.event import Event, finds
from mpguard.lint.facts.program import api_names

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView


@finds("autocast")
def _autocasts(facts: BehaviourView) -> Iterator[Event]:
    """Yield calls of an autocast with the dtypes of its region; `facts.regions` returns where it is entered."""
    aliases = facts.aliases("autocast")
    for name, calls in facts.calls.items():
        for call in calls if "autocast" in name or name in aliases else ():
            path = next((path for _, path in facts.paths(call) if path in api_names.AUTOCASTS), None)
            if path is not None:
                yield Event("autocast", call, facts, call.node, facts.autocast(call, path).dtypes)
