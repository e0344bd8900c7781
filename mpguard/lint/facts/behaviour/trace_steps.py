"""The steps of a trace, and what is before, between or around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

import libcst as cst

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.facts.behaviour.events.event import Event
from mpguard.lint.facts.program import roles
from mpguard.lint.facts.syntax.nodes import text_of
from mpguard.lint.facts.syntax.path_condition import (
    ALWAYS,
    MOST_CONDITIONS,
    All,
    PathCondition,
    compatible,
    negated,
)
from mpguard.lint.facts.syntax.records import Binding, Call, Record

StepKind = Literal[
    "scale", "backward", "framework", "unscale", "clip", "scaler_step", "step", "update", "get_scale",
    "zero_grad", "scheduler", "other_step", "read", "passed", "exit",
]  # fmt: skip
#: The states of gradients under loss scaling, and what ends each of them: the transitions of the protocol. A scaled
#: backward pass leads to the first one, `unscale` to the second, a step of the scaler to the third, and its update to
#: none of them. Other code that gets the scaler, or that computes with the scale, may do any of these.
ENDS: dict[Literal["scaled", "unscaled", "stepped"], tuple[StepKind, ...]] = {
    "scaled": ("unscale", "scaler_step", "step", "passed", "get_scale"),
    "unscaled": ("update", "passed"),
    "stepped": ("update", "passed"),
}
#: Flags that may choose between scaled and plain gradients: precision, backend, device, framework.
_PRECISION = lazy_pattern(
    r"(?i)16|amp(?!l)|scal|half|precision|dtype|apex|deepspeed|\bds_|fsdp|accelerat(?!ion_steps|e_grad)|mixed|native"
    r"|cuda|device|tpu|xla|npu|cpu|gpu|hpu|fabric|backend|engine|#|call"
)
#: Flags that have the same value in all micro-batches: options of clipping, scaling and precision.
_OPTION = lazy_pattern(r"(?i)clip|norm|grad_max|amp(?!l)|scal|16")
#: A name, or a dotted one, in the text of a flag.
_NAME = lazy_pattern(r"(?<![\w.])[A-Za-z_][\w.]*")
#: Flags for an overflow or an invalid batch: the branch is exceptional.
CHECKS = lazy_pattern(f"(?i){roles.OVERFLOWS}|invalid")


@dataclasses.dataclass(frozen=True, eq=False)
class TraceStep:
    """One operation in a trace.

    guard: its path condition, including those of the calls that lead to it; loops: those around it that run more than
    once, outermost first.
    via: the calls of helpers that lead to it. scale: for a backward pass, the event that scales its loss on every path;
    may_scale: on some. at: for an operation in a function of another module, the call of the file that runs it.
    """

    kind: StepKind
    record: Record
    event: Event | None = None
    guard: PathCondition = ALWAYS
    loops: tuple[cst.CSTNode, ...] = ()
    via: tuple[Call, ...] = ()
    scale: Event | None = None
    may_scale: Event | None = None
    at: Call | None = None

    @property
    def here(self) -> Record:
        """The operation, or the call of the file that runs it in another module."""
        return self.at or self.record

    @property
    def call(self) -> Call:
        """The call of an operation that is one."""
        assert isinstance(self.record, Call)
        return self.record

    @property
    def span(self) -> tuple[int, int]:
        """Start and end in `Source.text`, of the call that runs it if it is in another module."""
        return self.here.span

    @property
    def scaler(self) -> cst.BaseExpression | None:
        """The expression of the scaler, for a scaler's operation or a scaled backward pass."""
        if self.kind == "backward":
            return self.scale.subject if self.scale is not None else None
        return self.call.receiver

    @property
    def optimizer(self) -> cst.BaseExpression | None:
        """The expression of the optimizer, for an unscale or a step."""
        return self.event.subject if self.event is not None else None

    def ends(self, kind: type[cst.CSTNode]) -> bool:
        """True if it is an exit of this type: `continue`, `break`, `raise` or `return`."""
        return self.kind == "exit" and isinstance(self.record.node, kind)


Trace = tuple[TraceStep, ...]


def between(trace: Trace, first: int, last: int, *kinds: StepKind, guard: PathCondition) -> Iterator[TraceStep]:
    """Yield the steps of some kinds between two places of a trace that may be executed under a path condition."""
    for place in range(first + 1, last):
        step = trace[place]
        if step.kind in kinds and compatible(step.guard, guard) and not _leaves_between(trace, place, last):
            yield step


def _leaves_between(trace: Trace, place: int, last: int) -> bool:
    """True if control leaves between two places of a trace: `optimizer.zero_grad(); continue`."""
    step, target = trace[place], trace[last]
    for each in trace[place + 1 : last]:
        if each.kind != "exit" or each.guard - step.guard:
            continue
        loop = each.loops[-1] if each.loops and not each.ends(cst.Return) and not each.ends(cst.Raise) else None
        if loop in target.loops if loop is not None else target.via[: len(each.via)] == each.via:
            return True
    return False


def before(trace: Trace, place: int) -> Iterator[tuple[int, TraceStep]]:
    """Yield the backward passes whose gradients a step uses.

    These are the last one before it, and those that are the last one where it does not run.
    """
    step = trace[place]
    without = step.guard  # that none of those found so far runs
    for index in range(place - 1, -1, -1):
        each = trace[index]
        if each.kind not in ("backward", "framework") or not compatible(each.guard, without):
            continue
        yield index, each
        further = PathCondition(each.guard - step.guard)
        if not further or len(without) >= MOST_CONDITIONS:
            return
        without = without.given(negated(All(tuple(further))))


def discards(scale: TraceStep, backward: TraceStep) -> bool:
    """True if the result of a `scale` is discarded, and a backward pass runs on the loss that it did not change."""
    given = scale.call.positional[0] if scale.kind == "scale" and scale.call.positional else None
    loss = backward.call.receiver if backward.kind == "backward" else None
    return (
        given is not None
        and loss is not None
        and scale.call.is_statement
        and backward.scale is None
        and backward.record.scope is scale.record.scope
        and compatible(backward.guard, scale.guard)
        and text_of(given).strip("()") == text_of(loss).strip("()")
    )


def iteration(trace: Trace, step: TraceStep) -> list[tuple[int, TraceStep]]:
    """Return the steps in one iteration of the innermost loop around a step.

    Without a loop these are all steps of the trace.
    """
    loop = step.loops[-1] if step.loops else None
    return [(place, each) for place, each in enumerate(trace) if loop is None or loop in each.loops]


def is_covered(guard: PathCondition, by: Iterable[TraceStep]) -> bool:
    """True if one of some steps runs wherever a path condition holds: they are in all branches."""
    without = guard  # that none of those before runs
    for each in by:
        further = PathCondition(each.guard - guard)
        if not further:
            return True
        without = without.given(negated(All(tuple(further))))
    return not without.possible


def unrelated(later: PathCondition, earlier: PathCondition) -> bool:
    """True if the additional conditions of a path condition have nothing to do with precision.

    Otherwise they may be the same flag under another name, and choose between scaled and plain gradients.
    """
    return not any(_PRECISION.search(word) for word in PathCondition(later - earlier).words())


def rhythm(guard: PathCondition) -> bool:
    """True if some condition selects micro-batches of gradient accumulation."""
    return any(roles.ACCUMULATES.search(flag) for flag in guard.flags())


def same_each_time(guard: PathCondition) -> bool:
    """True if all conditions are options with one value for all micro-batches, such as that of clipping."""
    return all(map(_OPTION.search, guard.flags())) and not rhythm(guard)


def set_in_loop(guard: PathCondition, step: TraceStep) -> list[Binding]:
    """Return the bindings in the innermost loop around a step of the names in a condition: it changes while it runs."""
    scope, loop = step.record.scope, step.record.loops[-1] if step.record.loops else None
    names = {name for flag in guard.flags() for name in _NAME.findall(flag)}
    return [
        binding
        for name in sorted(names)
        for binding in scope.bindings.get(name, ())
        if loop is not None and loop in binding.loops
    ]


def exceptional(guard: PathCondition) -> bool:
    """True if some condition tests for an overflow or an invalid value."""
    return any(CHECKS.search(flag) for flag in guard.flags())


def chosen(backward: TraceStep, later: TraceStep) -> bool:
    """True if a backward pass runs under conditions that may choose between scaled and plain gradients.

    They are further ones than those of a later step, whose own conditions have to do with precision. A check of the
    loss before the backward pass is none, nor is the rhythm of gradient accumulation, or a `try` around the pass.
    """
    conditions = (PathCondition([each]) for each in backward.guard - later.guard)
    further = [
        each
        for each in conditions
        if not (exceptional(each) or rhythm(each) or all(flag.startswith("try#") for flag in each.flags()))
    ]
    return bool(further) and not unrelated(later.guard, backward.guard)
