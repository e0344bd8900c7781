"""What is known of a value or a model that is trained."""

from __future__ import annotations

import dataclasses

from mpguard.lint.facts.behaviour.events import Event
from mpguard.lint.facts.behaviour.forward_flow import Reach, Sink
from mpguard.lint.facts.program.dtypes import AnyDtype
from mpguard.lint.facts.syntax.path_condition import PathCondition
from mpguard.lint.facts.syntax.records import Call


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """How a value is trained: `sink` is the first place that shows it, `reach` all that the value reaches.

    by_engine: in other arms of the program an engine of DeepSpeed or the like runs the backward pass.
    """

    reach: Reach
    sinks: tuple[Sink, ...]
    by_engine: bool = False

    @property
    def sink(self) -> Sink:
        """The first place that shows that the value is trained."""
        return self.sinks[0]

    def of(self, kind: str) -> list[Call]:
        """Return the calls of the sinks of a kind.

        Kinds are `optimizer` (that takes the parameters), `trainer`, `prepare`, `parallel`.
        """
        return [sink.call for sink in self.sinks if sink.kind == kind]


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Low-precision weights that are trained: `event` (a `cast`, `construct` or `load`) is where they get the dtype."""

    event: Event
    dtype: AnyDtype
    guard: PathCondition
    training: Training
