from __future__ import annotations

from mpguard.lint import (
    All,
    Bad,
    Diagnostic,
    Facts,
    Good,
    Note,
    PathCondition,
    ScalingRule,
    Trace,
    TraceStep,
    any_of,
    compatible,
    lazy_pattern,
    negated,
    trace_facts,
)

#: Flags that have the same value in each micro-batch: clipping, scaling.
_OPTION = lazy_pattern(r"(?i)clip|norm|amp(?!l)|scal|16")


class UnscaleMisuse(ScalingRule):
    """`unscale_` is called twice for one step of an optimizer, or after the step.

    ## What it does
    Reports an `unscale_` that always follows another `unscale_`, or a `scaler.step`, of the same optimizer with no
    `update()` in between; and one for each micro-batch if `step` and `update` run once for several, under a condition
    that the loop sets.

    ## Why is this bad
    It raises (torch 2.13): "unscale_() has already been called on this optimizer since the last update()", "unscale_()
    is being called after step()". With gradient accumulation that happens at the second micro-batch.

    ## Known limits
    Two calls under different flags are taken for alternatives. Optimizers that are elements of a list are not
    distinguished.
    """

    code, name = "MPG206", "unscale-misuse"
    severity = "error"
    message = "`{expr}` {what}"
    help = "unscale once per step: after the last `backward`, before `step`"
    operations = ("unscale",)
    triggers = (any_of(b".unscale_("),)
    examples = (
        Bad(
            """\
from transformers import Trainer

class Collects(Trainer):
    def training_step(self, model, inputs):
        super().training_step(model, inputs)
        self.scaler.unscale_(self.optimizer)
        if self.args.max_grad_norm > 0:
            self.scaler.unscale_(self.optimizer)  # !
            self.clip(model)
        self.collect(model)
"""
        ),
        Good(
            """\
import torch

def two_optimizers(model, loader, one, two, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.unscale_(one)
        scaler.unscale_(two)
        scaler.step(one)
        scaler.step(two)
        scaler.update()

def several(model, loader, optimizers, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
"""
        ),
    )

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        unscale = trace[place]
        if not facts.scalers.like_torch(unscale.scaler, unscale.record):
            return None
        found = self._second(trace, place, facts) or self._each_microbatch(trace, place, facts)
        if found is None:
            return None
        what, other = found
        note = {"unscale": "it was unscaled here", "scaler_step": "the step is here"}[other.kind]
        return self.at(unscale, expr=facts.short(unscale.call.node), what=what, notes=(Note(note, other.span),))

    def _second(self, trace: Trace, place: int, facts: Facts) -> tuple[str, TraceStep] | None:
        unscale = trace[place]
        for index in range(place - 1, -1, -1):
            each = trace[index]
            if not compatible(each.guard, unscale.guard):
                continue
            if each.kind in ("update", "passed"):
                return None
            if each.kind not in ("unscale", "scaler_step") or each.record is unscale.record:
                continue
            if unscale.guard - each.guard and (each.kind != "unscale" or each.guard - unscale.guard):
                continue
            if not facts.scalers.same(each.optimizer, each.record, unscale.optimizer, unscale.record):
                continue
            if any(trace_facts.between(trace, index, place, "exit", guard=each.guard)):
                continue
            return ("is the second one for the step" if each.kind == "unscale" else "runs after the step"), each
        return None

    def _each_microbatch(self, trace: Trace, place: int, facts: Facts) -> tuple[str, TraceStep] | None:
        """Return the finding if it is called for each micro-batch, and the update once for several."""
        unscale = trace[place]
        if not unscale.loops:
            return None
        own = trace_facts.iteration(trace, unscale)
        scaled = [each for _, each in own if each.kind == "backward" and each.scale is not None]
        if not any(self._each_time(unscale, each) for each in scaled):
            return None  # a loop over optimizers, or the last micro-batch
        if any(each.kind == "passed" and compatible(each.guard, unscale.guard) for each in trace):
            return None
        updates = [e for e in trace if e.kind == "update" and compatible(e.guard, unscale.guard)]
        here = [each for each in updates if unscale.loops[-1] in each.loops]
        if any(not _selects(_extra_conditions(each, unscale), unscale) for each in here):
            return None
        if here and any(
            compatible(each.guard, unscale.guard.given(negated(All(tuple(_extra_conditions(here[0], unscale))))))
            for each in here[1:]
        ):
            return None  # one in each branch
        steps = [
            each
            for each in trace[place:]
            if each.kind == "scaler_step"
            and facts.scalers.same(each.optimizer, each.record, unscale.optimizer, unscale.record)
            and compatible(each.guard, unscale.guard)
        ]
        if not updates or not steps:
            return None
        step = steps[0]
        if here and not _selects(_extra_conditions(step, unscale), unscale):
            return None
        if not here and not any(set(each.loops) < set(unscale.loops) for each in updates):
            return None
        return "runs for each micro-batch, the step once for several", step

    def _each_time(self, unscale: TraceStep, backward: TraceStep) -> bool:
        """True if it runs as often as a backward, apart from options of the run."""
        return all(
            _OPTION.search(flag) and not trace_facts.rhythm(PathCondition([more]))
            for more in unscale.guard - backward.guard
            for flag in PathCondition([more]).flags()
        )


def _extra_conditions(each: TraceStep, unscale: TraceStep) -> PathCondition:
    return PathCondition(each.guard - unscale.guard)


def _selects(extra: PathCondition, unscale: TraceStep) -> bool:
    """True if a condition selects iterations of the loop: by its name, or by a name that the loop sets before."""
    if trace_facts.rhythm(extra):
        return True
    if not trace_facts.unrelated(extra, PathCondition()) or trace_facts.exceptional(extra):
        return False
    bindings = trace_facts.set_in_loop(extra, unscale)
    return bool(bindings) and all(binding.order < unscale.record.order for binding in bindings)
