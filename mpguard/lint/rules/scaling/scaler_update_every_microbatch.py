from __future__ import annotations

import re

from mpguard.lint import (
    Diagnostic,
    Facts,
    Note,
    PathCondition,
    ScalingRule,
    Trace,
    TraceStep,
    any_of,
    compatible,
    path_condition,
    trace_facts,
)

#: What should run as often as an operation, once per accumulated batch.
_TOGETHER: dict[trace_facts.StepKind, tuple[trace_facts.StepKind, ...]] = {
    "unscale": ("update",),
    "scaler_step": ("update", "zero_grad"),
    "update": ("scaler_step", "unscale"),
}


class ScalerUpdateEveryMicrobatch(ScalingRule, form_of="MPG206"):
    """The scaler unscales, steps or is updated at each micro-batch while gradients accumulate over several.

    An update changes the scale in the middle of an accumulation: the gradients of two micro-batches are then summed at
    two scales. Without an `unscale_` or `step` since the last one it raises (torch 2.13): "No inf checks were recorded
    prior to update". A second `unscale_` or `step` without an update raises, too, and a `step` at each micro-batch
    unscales gradients to which scaled ones are added next.

    Reported if another one of them, or `zero_grad`, runs once for several: under the condition of gradient
    accumulation, which is a remainder (`%`) or a name such as `accumulating`, `sync_gradients` and `should_step`. An
    `update` after the loop over micro-batches, or under any condition that the loop sets, makes `unscale_` raise, too.
    """

    severity = "warning"
    operations = tuple(_TOGETHER)
    message = "`{expr}` runs at each micro-batch, {other} once for several"
    help = "keep `unscale_`, `step`, `update` and `zero_grad` together, once per accumulated batch"
    triggers = (any_of(b".update("), any_of(b".step("), any_of(b".scale("))

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        step = trace[place]
        if not step.loops and (step.kind != "update" or step.record.scope.kind != "function"):
            return None  # its callers may clear the gradients
        is_torchs = facts.scalers.like_torch(step.scaler, step.record, step.call.name)
        rare = self._less_frequent(trace, step) if is_torchs else None
        if rare is None:
            return None
        expr, other = facts.short(step.call.node), f"`{facts.short(rare.call.func)}`"
        notes = (Note("this runs once for several", rare.span),)
        return self.at(step, expr=expr, other=other, notes=notes, severity="error" if step.kind == "unscale" else None)

    def _less_frequent(self, trace: Trace, step: TraceStep) -> TraceStep | None:
        """Return the call that should run as often as the step, but runs once per accumulated batch."""
        own = [each for _, each in trace_facts.iteration(trace, step) if compatible(each.guard, step.guard)]
        scaled = [each for each in own if each.kind == "scale"]
        if not scaled or any(each.kind == "passed" for each in own) or not self._at_each_microbatch(step, scaled):
            return None
        if step.kind == "scaler_step" and any(each.kind == "scaler_step" and each is not step for each in own):
            return None
        for partner in _TOGETHER[step.kind]:
            others = [each for each in own if each.kind == partner]
            if others and trace_facts.is_covered(step.guard, others):
                continue
            if step.kind == "unscale" and not others:
                around = (each for each in trace if each.kind == partner and compatible(each.guard, step.guard))
                return next((each for each in around if set(each.loops) < set(step.loops)), None)
            if others and all(self._only_when_accumulated(each, step) for each in others):
                return others[0]
        return None

    def _at_each_microbatch(self, step: TraceStep, scaled: list[TraceStep]) -> bool:
        if not step.loops and any(each.loops for each in scaled):
            return False  # it runs after all micro-batches
        more = (one for each in scaled for one in step.guard - each.guard)
        return all(_from_a_count_on(one) or _is_option(PathCondition([one]), step) for one in more)

    def _only_when_accumulated(self, each: TraceStep, than: TraceStep) -> bool:
        more = PathCondition(each.guard - than.guard)
        if trace_facts.rhythm(more):
            return True
        chosen = than.kind == "unscale" and trace_facts.unrelated(more, PathCondition())
        if not chosen or trace_facts.exceptional(more):
            return False
        bindings = trace_facts.set_in_loop(more, than)
        return bool(bindings) and all(binding.order < than.record.order for binding in bindings)


def _from_a_count_on(condition: path_condition.Condition) -> bool:
    """True for `step >= accumulation_steps`: from then on it holds in each micro-batch."""
    return (
        isinstance(condition, path_condition.Flag)
        and bool(re.search(r"[^<>=]>=?[^>]", condition.name))
        and "%" not in condition.name
    )


def _is_option(more: PathCondition, step: TraceStep) -> bool:
    """True if a condition has one value for all micro-batches, as a name that only the caller or `__init__` sets."""
    if trace_facts.same_each_time(more):
        return True
    names, owner = more.flags(), step.record.scope.owner
    methods = owner.children if owner is not None else [step.record.scope]
    set_here = (key for each in methods if each.name != "__init__" for key in each.bindings)
    is_set = not names.isdisjoint(key.removeprefix("self.") for key in set_here)
    selects = is_set or trace_facts.rhythm(more) or trace_facts.exceptional(more)
    return not selects and all(map(str.isidentifier, names))
