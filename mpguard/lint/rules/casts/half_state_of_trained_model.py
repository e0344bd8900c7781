from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import HALF_DTYPES, Call, Diagnostic, Dtype, Event, Facts, Note, Rule, any_of, dotted


class HalfStateOfTrainedModel(Rule, form_of="MPG107"):
    """The model is cast for each checkpoint (`model.half().state_dict()`), and trained on after it.

    A module is cast in place: from the first checkpoint on its weights are FP16 or BF16, and so is what the optimizer
    updates. FP16 weights end a run with a GradScaler ("Attempting to unscale FP16 gradients").

    Not reported for a copy, for a model that is cast back, and where the checkpoint is written once, at the end.
    """

    severity = "error"
    message = "`{expr}` makes the weights {dtype} that are trained on after this checkpoint"
    help = "cast the tensors of the state: `{{key: value.half() for key, value in model.state_dict().items()}}`"
    triggers = (any_of(b".state_dict("), any_of(b".half().state", b".bfloat16().state", b"16).state", b"dtype).state"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        casts = {event.call.node: event for event in facts.events("cast")} if facts.calls.get("state_dict") else {}
        for call in facts.calls.get("state_dict", ()):
            event = casts.get(call.receiver) if isinstance(call.receiver, cst.Call) else None
            dtype = next((each for each in HALF_DTYPES if event is not None and event.may_be(each)), None)
            if event is None or dtype is None or not event.key or _is_copy(event, facts) or _is_cast_back(event, facts):
                continue
            trainer = facts.optimizers.trainer_of(event.call)
            if trainer is not None and (call.loops or facts.repeated(call.scope)):
                notes = (Note("trained here", trainer.span, facts.elsewhere(trainer)),)
                yield self.at(event, expr=facts.short(event.call.node), dtype=dtype.label, notes=notes)


def _is_copy(event: Event, facts: Facts) -> bool:
    """True if the name is bound to a copy, or to what was loaded: nothing trains it."""
    values = [each.value for each in facts.bindings(event.key, event.call) if each.kind == "assign"]
    made = (dotted(each.func).rsplit(".", 1)[-1] for each in values if isinstance(each, cst.Call))
    return any(each == "deepcopy" or each.startswith(("load", "from_")) for each in made)


def _is_cast_back(event: Event, facts: Facts) -> bool:
    """True if the model is cast to FP32 afterwards, in the same function."""

    def restores(call: Call) -> bool:
        return call.scope is event.scope and call.order > event.order and dotted(call.receiver) == event.key

    back = (each.call for each in facts.events("cast") if {dtype for _, dtype in each.dtypes} == {Dtype.FP32})
    return any(map(restores, (*back, *facts.calls.get("float", ()))))
