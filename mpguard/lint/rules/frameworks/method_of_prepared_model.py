from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Call, Diagnostic, Facts, Note, Object, Rule, accelerate_precision, any_of

#: The methods of diffusers' models, other than `forward`, that compute.
_COMPUTES = frozenset({"encode", "decode"})


class MethodOfPreparedModel(Rule, form_of="MPG529"):
    """A step trains through a method of a prepared model that is not its `forward`.

    `prepare` puts autocast around the `forward` of a model, and around no other method: what `model.decode(latents)`
    computes is in FP32.

    Reported where the model is in FP32, the method calls layers, and not `forward`, and no autocast is around the call
    or in the method. Methods of models of the project are read; of other models, `encode` and `decode` of diffusers'.
    """

    message = "`{method}` is not `forward`, the only method of a prepared model with autocast: it runs in FP32"
    help = "call it under `accelerator.autocast()`"
    triggers = (any_of(b"mixed_precision"), any_of(b".prepare("), any_of(b".backward("))

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or not accelerate_precision.asks_for_autocast(facts):
            return
        for call in dict.fromkeys(call for event in facts.events("framework") for call in event.scope.calls):
            if call.receiver is None or any(region.kind.endswith("autocast") for region in facts.regions(call)):
                continue
            made = [each.atom for each in facts.evaluate(call.receiver, call)]
            model = made[0] if len(made) == 1 and isinstance(made[0], Object) and made[0].prepared else None
            if model is None or model.call is None or model.kind != "model" or not self._computes(model, call, facts):
                continue
            if (
                facts.casts.may_be_low(model.call)
                or not facts.flow.forward(call.node, call, past_targets=False).training_sinks
            ):
                continue
            notes = (Note("created here", model.call.span, facts.elsewhere(model.call)),)
            yield self.at(call, method=facts.short(call.func), notes=notes)

    def _computes(self, model: Object, call: Call, facts: Facts) -> bool:
        """True if a method of a model computes with its layers, without autocast and without `forward`."""
        if model.cls is None:
            return model.path.startswith("diffusers.") and call.name in _COMPUTES
        method = model.cls.method(call.name)
        if method is None or method.name == "forward" or method.decorators or method.withs:
            return False
        own, inner = facts.of(method), [each for each in method.calls if each.path.startswith("self")]
        if any(each.path in ("self", "self.forward") for each in inner):
            return False
        layers = [each.atom for layer in inner for each in own.evaluate(layer.func, layer)]
        return any(isinstance(atom, Object) and atom.kind == "model" for atom in layers)
