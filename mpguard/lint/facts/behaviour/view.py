"""`BehaviourView`: what happens when the code of a file runs."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Protocol

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events.event import Event, EventKind
from mpguard.lint.facts.behaviour.frozen_params import FrozenModels
from mpguard.lint.facts.behaviour.measures import Measures
from mpguard.lint.facts.behaviour.regions import Region, Regions, enabled_argument
from mpguard.lint.facts.program import api_names, implied_versions, roles
from mpguard.lint.facts.program.callgraph import CallGraph
from mpguard.lint.facts.program.classes import Classes
from mpguard.lint.facts.program.evaluate import DEPTH, Values
from mpguard.lint.facts.program.view import ProgramView
from mpguard.lint.facts.syntax.constant_flags import SUPPORTS_BF16
from mpguard.lint.facts.syntax.nodes import dotted
from mpguard.lint.facts.syntax.path_condition import PathCondition, compatible
from mpguard.lint.facts.syntax.records import Binding, Call, Record, Scope, With
from mpguard.lint.project.api import ProjectApi
from mpguard.lint.project.requirements import Required
from mpguard.lint.source.libcst_internals import Frames
from mpguard.lint.source.source import Source

#: Events of training that a framework runs.
_TRAINS: tuple[EventKind, ...] = ("prepare", "initialize", "trainer")
#: Methods of modules that tensors do not have.
_OF_MODULES = frozenset({
    "parameters", "named_parameters", "modules", "named_modules", "children", "named_children", "train", "eval",
    "gradient_checkpointing_enable", "save_pretrained",
})  # fmt: skip
#: Receivers that have a `step` method and are not optimizers: schedulers, profilers, environments, progress bars.
_NO_OPTIMIZER = lazy_pattern(r"sched|profil|\bprof\b|\benv|warmup|timer|\bp?bar\b|\bema\b")
#: Methods of optimizers of a project: `optimizer.step_and_update_lr(scaler)`.
_STEPS = lazy_pattern(r"(?:^|_)step(?:_|$)")


class DataFlow(Protocol):
    """The data flow of a file, as its own layer uses it: `flow.Flow`."""

    uses_left: int

    @property
    def exhausted(self) -> bool: ...
    def between(self, bindings: Sequence[Binding], first: int, last: int) -> Sequence[Binding]: ...
    def backward(self, node: cst.CSTNode, at: Record, depth: int = ...) -> list[Record]: ...


class BehaviourView(ProgramView):
    """The behaviour of the code of one file."""

    values: Values
    classes: Classes
    graph: CallGraph
    flow: DataFlow

    def __init__(self, source: Source, project: ProjectApi | None = None, imported: bool = False) -> None:
        super().__init__(source, project, imported)
        self.values = self.part(Values)
        self.classes = self.part(Classes)
        self.graph = self.part(CallGraph)
        self.regions_index = self.part(Regions)
        self.frozen_params = self.part(FrozenModels)
        self.measures = self.part(Measures)
        self._required: dict[str, Required] = {}
        self._supports_bf16: bool | None = None
        self._steps: dict[Scope, bool] = {}
        self._inference_scopes: dict[Scope, bool] = {}
        self._active: set[object] = set()

    # -- versions -----------------------------------------------------------------------------------

    def required(self, library: str) -> Required:
        """Return the versions of a library that the project requires, and those that the code itself can run with."""
        if library not in self._required:
            below = implied_versions.lowest_too_high(self, library)
            self._required[library] = self.project.required(self.path, library).bounded(below)
        return self._required[library]

    def always_supports_bf16(self) -> bool:
        """True if `torch.cuda.is_bf16_supported()` is True on each GPU: the required torch counts emulation."""
        if self._supports_bf16 is None:
            asks = SUPPORTS_BF16 in self.file_text
            self._supports_bf16 = asks and self.required("torch").since(api_names.COUNTS_EMULATION)
        return self._supports_bf16

    # -- regions ------------------------------------------------------------------------------------

    def regions(self, record: Record) -> tuple[Region, ...]:
        """Return the contexts around a record, outermost first: decorators of its functions, and `with` items."""
        return self.of(record).regions_index.around(record)

    def autocasts(self, record: Record, depth: int = 3) -> list[tuple[Region, PathCondition]]:
        """Return the autocast regions that are active at a record.

        These are those of its function, otherwise those of its callers.
        """
        with Frames():
            return self.of(record).regions_index.autocasts(record, depth)

    def entered(self, item: With) -> tuple[Region, ...]:
        """Return the regions that a `with` item enters."""
        return self.of(item).regions_index.entered(item)

    def off_by_default(self, region: Region) -> bool:
        """True if `enabled` of a region is a parameter whose default is False."""
        return self.regions_index.off_by_default(region)

    def switched_off(self, region: Region, program: Collection[Scope]) -> bool:
        """True if `enabled` of a region is a parameter that no call in a program's files sets to anything but False."""
        return self.regions_index.switched_off(region, program)

    def autocast(self, call: Call, path: str) -> Region:
        """Return the region that a call of an autocast creates: its device and dtype, with torch's defaults."""
        return self.of(call).regions_index.autocast(call, path)

    def enabled(self, call: Call, path: str) -> PathCondition:
        """Return the path condition that `enabled=` of an autocast or a scaler stands for.

        It is an impossible one for `False`.
        """
        return self.of(call).regions_index.enabled(call, path)

    def enabled_argument(self, call: Call, path: str) -> cst.BaseExpression | None:
        """Return what `enabled=` of an autocast or a scaler is, by its place or its name."""
        return enabled_argument(call, path)

    # -- events -------------------------------------------------------------------------------------

    @abstractmethod
    def events(self, kind: EventKind) -> list[Event]:
        """Return all events of a kind in the file, in order of evaluation."""

    def events_around(self, kind: EventKind, scope: Scope) -> list[Event]:
        """Return the events of a kind in the file, and those in the functions of other files connected with a scope."""
        near = self.reachable(scope)
        others = dict.fromkeys(self.of(each) for each in sorted(near, key=lambda each: each.chunk.source.path))
        outside = (event for other in others if other is not self for event in other.events(kind))
        return [*self.events(kind), *(event for event in outside if event.scope in near)]

    # -- training and inference ---------------------------------------------------------------------

    def is_inference(self, record: Record) -> bool:
        """True if a record belongs to inference.

        The regions around it, the names of its functions, or its callers show it.
        """
        if any(
            region.kind == "no_grad" and compatible(region.guard, record.guard) and not (region.guard - record.guard)
            for region in self.regions(record)
        ):
            return True
        return self.is_inference_scope(record.scope)

    def is_inference_scope(self, scope: Scope) -> bool:
        """True if a scope is used for inference only.

        The names of the functions around it, or all of its callers, show it.
        """
        if (facts := self.of(scope)) is not self:
            return facts.is_inference_scope(scope)
        if scope in self._inference_scopes:
            return self._inference_scopes[scope]
        found, whole = self._find_inference_scope(scope), not self._active
        if whole:  # within a cycle of calls the result may be incomplete
            self._inference_scopes[scope] = found
        return found

    def _find_inference_scope(self, scope: Scope) -> bool:
        key = ("infers", scope)
        if key in self._active or len(self._active) > DEPTH:
            return False
        self._active.add(key)
        try:
            for place in scope.within():
                if place.kind == "function" and roles.evaluates(place.name) and not _trains(place):
                    return True
            if scope.kind != "function":
                return False
            callers = self.callers(scope)
            if not callers or self.escapes(scope):
                return False
            if _optimizes(scope):  # as a part of an evaluation, a probe is trained; that of a test is not
                return all(any(roles.measures(place.name) for place in call.scope.within()) for call in callers)
            return all(self.of(call).is_inference(call) for call in callers)
        finally:
            self._active.discard(key)

    @cached_property
    def module_names(self) -> set[str]:
        """The last names of the objects that the file uses as modules: `x.parameters()`, `x.train()`."""
        found = {dotted(call.receiver).rsplit(".", 1)[-1] for name in _OF_MODULES for call in self.calls.get(name, ())}
        return found - {"", "self"}

    @cached_property
    def any_training(self) -> bool:
        """True if the file trains at all: it has a backward pass, `prepare`, `deepspeed.initialize` or a trainer."""
        return bool(self.calls.get("backward") or self.calls.get("manual_backward")) or any(
            self.events(kind) for kind in _TRAINS
        )

    def has_step(self, scope: Scope) -> bool:
        """True if gradients are applied in the functions connected with a scope.

        They are applied by a `step` of anything but a scheduler.
        """
        if scope not in self._steps:
            self._steps[scope] = any(
                (
                    call.name == "step"
                    or (_STEPS.search(call.name) and roles.OPTIMIZER.search(self.short(call.receiver)))
                )
                and call.receiver is not None
                and not _NO_OPTIMIZER.search(self.short(call.receiver).lower())
                and "scheduler" not in self.kinds(call.receiver, call)
                for place in self.reachable(scope)
                for call in place.calls
            )
        return self._steps[scope]


def _trains(scope: Scope) -> bool:
    """True if a function trains whatever its name is: `eval_linear` calls `train(...)`, or steps on parameters.

    Or it gives an optimizer that it makes to a function that it calls in a loop.
    """
    calls_trainer = any(call.receiver is None and roles.trains(call.name) for call in scope.calls)
    return calls_trainer or ((_optimizes(scope) or _hands_out_optimizer(scope)) and not roles.measures(scope.name))


def _optimizes(scope: Scope) -> bool:
    """True if a function takes steps on the parameters of a model in a loop."""
    looped = {call.name for call in scope.calls if call.loops and call.receiver is not None}
    return {"backward", "step"} <= looped and any(call.name == "parameters" for call in scope.calls)


def _hands_out_optimizer(scope: Scope) -> bool:
    """True if a function makes an optimizer (`optim.SGD(...)`), and passes it to a function in a loop."""
    made = {
        key
        for key, bindings in scope.bindings.items()
        for binding in bindings
        if isinstance(binding.value, cst.Call) and re.search(r"(?:^|\.)optim\.", dotted(binding.value.func))
    }
    looped = (call for call in scope.calls if call.loops and call.receiver is None)
    return bool(made) and any(dotted(arg.value) in made for call in looped for arg in call.node.args)
