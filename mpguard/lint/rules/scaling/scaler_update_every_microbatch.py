from __future__ import annotations

import re

from mpguard.lint import (
    Condition,
    Diagnostic,
    Facts,
    Flag,
    Note,
    PathCondition,
    ScalingRule,
    Trace,
    TraceStep,
    any_of,
    compatible,
    lazy_pattern,
    trace_facts,
)

#: Conditions of gradient accumulation only: `(i + 1) % n == 0`.
_ACCUMULATES = lazy_pattern(r"(?i)%|accum")


class ScalerUpdateEveryMicrobatch(ScalingRule, form_of="MPG206"):
    """The scaler is updated, or steps, at each micro-batch while gradients accumulate over several.

    An update changes the scale in the middle of an accumulation: the gradients of two micro-batches are then summed at
    two scales. Without an `unscale_` or `step` since the last one it raises (torch 2.13): "No inf checks were recorded
    prior to update". A `step` at each micro-batch unscales gradients to which scaled ones are added next.

    Only an `if` whose condition is a remainder (`%`) or contains "accum" is taken for gradient accumulation.
    """

    severity = "warning"
    operations = ("update", "scaler_step")
    message = "`{expr}` runs at each micro-batch, {other} once for several"
    help = "keep `step`, `update` and `zero_grad` together, once per accumulated batch"
    triggers = (any_of(b".update(", b".zero_grad("), any_of(b".step("), any_of(b".scale("), any_of(b"%", b"ccum"))

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        step = trace[place]
        if not step.loops and (step.kind != "update" or step.record.scope.kind != "function"):
            return None  # its callers may clear the gradients
        rare = self._less_frequent(trace, step) if facts.scalers.like_torch(step.scaler, step.record) else None
        if rare is None:
            return None
        expr, other = facts.short(step.call.node), f"`{facts.short(rare.call.func)}`"
        return self.at(step, expr=expr, other=other, notes=(Note("this runs once for several", rare.span),))

    def _less_frequent(self, trace: Trace, step: TraceStep) -> TraceStep | None:
        """Return the call that should run as often as the step, but runs once per accumulated batch."""
        own = [each for _, each in trace_facts.iteration(trace, step) if compatible(each.guard, step.guard)]
        scaled = [each for each in own if each.kind == "backward" and each.scale is not None]
        if not scaled or any(each.kind == "passed" for each in own) or not self._at_each_microbatch(step, scaled):
            return None
        partner = "scaler_step" if step.kind == "update" else "zero_grad"
        others = [each for each in own if each.kind == partner]
        if step.kind == "scaler_step" and any(each.kind == "scaler_step" and each is not step for each in own):
            return None
        if others and all(self._only_when_accumulated(each, step) for each in others):
            return others[0]
        return None

    def _at_each_microbatch(self, step: TraceStep, scaled: list[TraceStep]) -> bool:
        if not step.loops and any(each.loops for each in scaled):
            return False  # it runs after all micro-batches
        return all(not [one for one in step.guard - each.guard if not _from_a_count_on(one)] for each in scaled)

    def _only_when_accumulated(self, each: TraceStep, than: TraceStep) -> bool:
        return any(
            any(_ACCUMULATES.search(flag) for flag in PathCondition([condition]).flags())  # `... or last`
            for condition in each.guard - than.guard
        )


def _from_a_count_on(condition: Condition) -> bool:
    """True for `step >= accumulation_steps`: from then on it holds in each micro-batch."""
    return (
        isinstance(condition, Flag) and bool(re.search(r"[^<>=]>=?[^>]", condition.name)) and "%" not in condition.name
    )
