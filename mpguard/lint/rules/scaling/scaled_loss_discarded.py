from __future__ import annotations

from mpguard.lint import (
    Diagnostic,
    Facts,
    Fix,
    Note,
    ScalingRule,
    Trace,
    TraceStep,
    any_of,
    python_edits,
    trace_facts,
)


class ScaledLossDiscarded(ScalingRule, form_of="MPG202"):
    """The result of `scaler.scale(loss)` is discarded, and `backward()` runs on the loss that is not scaled.

    `scale` returns the scaled loss and does not change its argument. The gradients stay small and underflow in FP16,
    and `scaler.step` then divides them by a scale that they were not multiplied by: the steps have 1/65536 of their
    size.

    The loss must have the same name in both places.
    """

    in_tests = True
    operations = ("scale",)
    message = "the result of `{expr}` is discarded"
    help = "`scale` returns the scaled loss: call `backward()` on that"
    triggers = (any_of(b".scale("), any_of(b".backward("), any_of(b"scaler", b"Scaler"))
    fixes = True

    def misuse(self, trace: Trace, place: int, facts: Facts) -> Diagnostic | None:
        scale = trace[place]
        backward = next((each for each in trace[place + 1 :] if trace_facts.discards(scale, each)), None)
        if backward is None or not facts.scalers.like_torch(scale.scaler, scale.record):
            return None
        notes = (Note("this runs on the loss that is not scaled", backward.span),)
        return self.at(scale, expr=facts.short(scale.call.node), notes=notes, fix=self._fix(scale, backward, facts))

    def _fix(self, scale: TraceStep, backward: TraceStep, facts: Facts) -> Fix | None:
        assert backward.call.receiver is not None
        if facts.parent(scale.call.line) is not facts.parent(backward.call.line):
            return None
        edits = (
            python_edits.without_statement(facts, scale.call),
            python_edits.replaced(backward.call.receiver, backward.call, facts.text(scale.call.node, scale.call)),
        )
        return Fix("Call `backward` on the scaled loss", "unsafe", edits)
