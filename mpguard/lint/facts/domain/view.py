"""`DomainView`: all that happens in a file, for what the domain makes of it."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from mpguard.lint.facts.behaviour.autocast_state import AutocastStates
from mpguard.lint.facts.behaviour.compiled import compiled, compiled_by
from mpguard.lint.facts.behaviour.events import FINDERS, Event, EventKind
from mpguard.lint.facts.behaviour.flow import Flow
from mpguard.lint.facts.behaviour.options import Option, forgotten_dtypes
from mpguard.lint.facts.behaviour.precision import TensorDtypes
from mpguard.lint.facts.behaviour.scalars import Scalars
from mpguard.lint.facts.behaviour.scalers import Scalers
from mpguard.lint.facts.behaviour.trace import Traces
from mpguard.lint.facts.behaviour.view import BehaviourView
from mpguard.lint.facts.syntax.path_condition import ALWAYS, PathCondition
from mpguard.lint.facts.syntax.records import Call, Scope
from mpguard.lint.project.api import ProjectApi
from mpguard.lint.source.libcst_internals import Frames
from mpguard.lint.source.source import Source


class DomainView(BehaviourView):
    """The behaviour of the code of one file, with its events, flow, dtypes and traces."""

    flow: Flow

    def __init__(self, source: Source, project: ProjectApi | None = None, imported: bool = False) -> None:
        super().__init__(source, project, imported)
        self.flow = self.part(Flow)
        self.autocast_states = self.part(AutocastStates)
        self.precision = self.part(TensorDtypes)
        self.scalars = self.part(Scalars)
        self._events: dict[EventKind, list[Event]] = {}

    def events(self, kind: EventKind) -> list[Event]:
        """Return all events of a kind in the file, in order of evaluation."""
        self.need_all()
        if kind not in self._events:
            with Frames():
                self._events[kind] = sorted(FINDERS[kind](self), key=lambda event: event.order)
        return self._events[kind]

    @cached_property
    def traces(self) -> Traces:
        """The sequences of operations on scaled gradients in order of control flow, with helper functions expanded."""
        self.need_all()
        return self.part(Traces)

    @cached_property
    def scalers(self) -> Scalers:
        """GradScalers as objects: which one an expression is, when it is enabled, and which losses it scales."""
        self.need_all()
        return self.part(Scalers)

    def compiles(self, guard: PathCondition = ALWAYS, model: Event | None = None) -> bool:
        """True if something may be compiled under a path condition: by a call, an option, or a decorator.

        model: the event whose subject it may be; what is definitely another object does not count.
        """
        return compiled(self, guard, model)

    def compiled_by(self, scopes: Collection[Scope], model: Event) -> bool:
        """True if one of these functions, in another file than the model's, may compile the subject of an event."""
        return compiled_by(self.of(model.call), scopes, model)

    @cached_property
    def forgotten_dtypes(self) -> dict[Call, Option]:
        """The autocasts without a dtype in a script whose own option or constant selects BF16.

        Each is returned with that option.
        """
        return forgotten_dtypes(self)
