"""FP8 conversions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint.events.event import Event, aliases, called, finds

if TYPE_CHECKING:
    from mpguard.lint.facts import Facts


@finds("convert")
def _converts(facts: Facts) -> Iterator[Event]:
    for call in called(facts, "convert_to_float8_training", *aliases(facts, "convert_to_float8_training")):
        if any(path == "torchao.float8.convert_to_float8_training" for _, path in facts.paths(call)):
            yield Event("convert", call, facts, call.argument(0, "module"))
