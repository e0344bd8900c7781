from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Call, Diagnostic, Facts, Note, Object, Rule, accelerate_precision, any_of, dotted

#: What applies its own precision or wrapper to a model.
_TAKES_OVER = frozenset({"prepare", "parallel", "initialize", "trainer", "engine", "peft"})


class TrainedModelNotPrepared(Rule, form_of="MPG529"):
    """A model that is trained is not given to `prepare`, in a file that prepares the optimizer or the data.

    Accelerate wraps the forward of prepared models in autocast, and no other code: this one computes in FP32, and
    processes do not average its gradients.

    Reported where one function calls the model and runs `accelerator.backward`, all arguments of `prepare` are names,
    an optimizer of the file takes the model's parameters, and nothing casts it or hands it on.
    """

    message = "`{model}` is trained, and not prepared: its forward runs in FP32, whatever `mixed_precision` is"
    help = "give the model to `accelerator.prepare`, too"
    triggers = (any_of(b"mixed_precision"), any_of(b".prepare("), any_of(b".backward("), any_of(b"arameters()"))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        prepares = [event.call for event in facts.events("prepare")]
        given = [dotted(each) for call in prepares for each in call.positional]
        if facts.declared == "inference" or not prepares or not accelerate_precision.asks_for_autocast(facts):
            return
        if not all(given) or any(call.starred or call.keywords for call in prepares):
            return
        reported: set[Call] = set()
        for call in dict.fromkeys(call for event in facts.events("framework") for call in event.scope.calls):
            made = [each.atom for each in facts.evaluate(call.func, call)]
            model = made[0] if len(made) == 1 and isinstance(made[0], Object) and made[0].kind == "model" else None
            if model is None or model.prepared or model.call is None or model.call in reported:
                continue
            if self._is_trained_alone(model.call, facts) and not facts.casts.may_be_low(model.call):
                under_autocast = any(region.kind.endswith("autocast") for region in facts.regions(call))
                if not under_autocast and facts.flow.forward(call.node, call, past_targets=False).training_sinks:
                    reported.add(model.call)
                    notes = (Note("created here", model.call.span, facts.elsewhere(model.call)),)
                    yield self.at(call, model=call.path or facts.short(call.func), notes=notes)

    def _is_trained_alone(self, created: Call, facts: Facts) -> bool:
        """True if an optimizer of the file takes the parameters of a model, and nothing else takes the model."""
        bound = facts.bound_to(created) if facts.of(created) is facts else None
        if bound is None:
            return False
        reach = facts.flow.forward_key(bound.key, bound)
        return reach.meets("optimizer") and not any(map(reach.meets, _TAKES_OVER)) and not reach.outside
