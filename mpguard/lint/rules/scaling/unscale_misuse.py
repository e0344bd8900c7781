from __future__ import annotations

from mpguard.lint import (
    Bad,
    Diagnostic,
    Facts,
    Good,
    Note,
    ScalingRule,
    Trace,
    TraceStep,
    any_of,
    compatible,
    trace_facts,
)


class UnscaleMisuse(ScalingRule):
    """`unscale_` is called twice for one step of an optimizer, or after the step.

    ## What it does
    Reports an `unscale_` that always follows another `unscale_`, or a `scaler.step`, of the same optimizer with no
    `update()` in between.

    ## Why is this bad
    It raises (torch 2.13): "unscale_() has already been called on this optimizer since the last update()", "unscale_()
    is being called after step()".

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
        other = self._other(trace, place, facts)
        if other is None or not facts.scalers.like_torch(unscale.scaler, unscale.record):
            return None
        again = other.kind == "unscale"
        what = "is the second one for the step" if again else "runs after the step"
        notes = (Note("it was unscaled here" if again else "the step is here", other.span),)
        return self.at(unscale, expr=facts.short(unscale.call.node), what=what, notes=notes)

    def _other(self, trace: Trace, place: int, facts: Facts) -> TraceStep | None:
        """Return the step, or the other call, since the last update."""
        unscale = trace[place]
        for index in range(place - 1, -1, -1):
            each = trace[index]
            if not compatible(each.guard, unscale.guard):
                continue
            if each.kind in trace_facts.ENDS["stepped"]:
                return None
            if each.kind not in ("unscale", "scaler_step") or each.record is unscale.record:
                continue
            if unscale.guard - each.guard and (each.kind != "unscale" or each.guard - unscale.guard):
                continue
            if not facts.scalers.same(each.optimizer, each.record, unscale.optimizer, unscale.record):
                continue
            if not any(trace_facts.between(trace, index, place, "exit", guard=each.guard)):
                return each
        return None
