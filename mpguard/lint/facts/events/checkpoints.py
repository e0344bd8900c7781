"""What is written to checkpoints, and read back: `x.state_dict()` and `x.load_state_dict(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint.facts.events.event import Event, called, finds

if TYPE_CHECKING:
    from mpguard.lint.facts.file import Facts


@finds("state")
def _states(facts: Facts) -> Iterator[Event]:
    for call in called(facts, "state_dict"):
        if call.receiver is not None:
            yield Event("state", call, facts, call.receiver)


@finds("restore")
def _restores(facts: Facts) -> Iterator[Event]:
    for call in called(facts, "load_state_dict"):
        if call.receiver is not None:
            yield Event("restore", call, facts, call.receiver)
