"""Events of checkpoints: `x.state_dict()`, `x.load_state_dict(...)`, and torch's functions for both.

Such a function is `get_state_dict(model, optimizers)` of `torch.distributed.checkpoint.state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mpguard.lint.facts.behaviour.events.event import Event, EventKind, finds
from mpguard.lint.facts.syntax.records import Call
from mpguard.lint.facts.syntax.view import called

if TYPE_CHECKING:
    from mpguard.lint.facts.behaviour.view import BehaviourView

#: torch's functions for an optimizer's state -> the position of their argument `optimizers`.
_GETS = {"get_state_dict": 1, "get_optimizer_state_dict": 1}
_SETS = {"set_state_dict": 1, "set_optimizer_state_dict": 1}


@finds("state")
def _states(facts: BehaviourView) -> Iterator[Event]:
    """Yield the calls that return the state of an object."""
    yield from _calls_of("state", "state_dict", _GETS, facts)


@finds("restore")
def _restores(facts: BehaviourView) -> Iterator[Event]:
    """Yield the calls that restore the state of an object."""
    yield from _calls_of("restore", "load_state_dict", _SETS, facts)


def _calls_of(kind: EventKind, method: str, functions: Mapping[str, int], facts: BehaviourView) -> Iterator[Event]:
    """Yield the calls of a method of the object, and of functions that get an optimizer at a position."""
    for call in called(facts, method):
        if call.receiver is not None:
            yield Event(kind, call, facts, call.receiver)
    for name, place in functions.items():
        for call in called(facts, name):
            optimizer = call.argument(place, "optimizers")
            if optimizer is not None and _distributed(facts, call):
                yield Event(kind, call, facts, optimizer)


def _distributed(facts: BehaviourView, call: Call) -> bool:
    return facts.called_path(call).startswith("torch.distributed.checkpoint.")
