from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, Dtype, Facts, Note, Rule, any_of, dtype_triggers


class EmaOfHalfModel(Rule, form_of="MPG109"):
    """A class of the project averages a copy of a model whose weights are BF16.

    The copy has the dtype of the weights, in which the average does not move.

    Reported where the weights are cast or loaded, if they are trained. Silent if the class casts the copy to FP32.
    FP16 weights that are trained are reported by MPG101 and MPG103.
    """

    message = "`{expr}` makes the weights BF16, and `{average}` averages a copy in that dtype: it does not move"
    help = "keep the average in FP32: `copy.deepcopy(model).float()`"
    triggers = (any_of(*dtype_triggers.CASTS_LOW_PRECISION, b"_to_bf16()"),)
    triggers_nearby = (
        any_of(b"EMA", b"Ema", b"MovingAverage"),
        any_of(b"deepcopy(", b".clone("),
        any_of(b"mul_(", b"lerp"),
        any_of(b".step("),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        for weights in facts.training_use.weights(Dtype.BF16):
            taken = [sink.call for sink in weights.training.reach.sinks if sink.kind == "average"]
            if taken:
                call = weights.event.call
                expr = facts.short(call.func if weights.event.kind == "load" else call.node)
                notes = (Note("averaged here", taken[0].span, facts.elsewhere(taken[0])),)
                yield self.at(weights.event, expr=expr, average=taken[0].name, notes=notes)
