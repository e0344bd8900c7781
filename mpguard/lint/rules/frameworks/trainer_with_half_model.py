from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Call, Constant, Diagnostic, Dtype, Facts, Note, Rule, Weights, any_of, compatible


class TrainerWithHalfModel(Rule, form_of="MPG103"):
    """`TrainingArguments(fp16=True)` with a model that is loaded in FP16.

    `fp16=True` is mixed precision: FP32 weights, FP16 autocast, a GradScaler. The scaler refuses the gradients of FP16
    weights: the first step with gradient clipping (on by default) raises "Attempting to unscale FP16 gradients".
    Without an FP32 copy of the weights, updates below 2^-11 of a weight would be lost as well.

    Not reported for LoRA and other adapters (PEFT keeps those in FP32), 8-bit and 4-bit loads, DeepSpeed, and arguments
    that are created elsewhere.
    """

    severity = "warning"
    message = "`{expr}` loads FP16 weights for a Trainer with `fp16=True`, whose GradScaler refuses them"
    help = "load the weights in FP32, or train with `bf16=True`"
    triggers = (
        any_of(b"fp16=", b"fp16 ="),
        any_of(b"Trainer"),
        any_of(b"float16", b".half", b"import half"),
        any_of(b"from_pretrained", b"from_config"),
    )
    yields_to = ("MPG862",)

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference" or not facts.events("trainer") or self._only_evaluates(facts):
            return
        for weights in facts.training_use.weights(Dtype.FP16):
            if weights.event.kind != "load":
                continue
            for trainer in facts.optimizers.trainers(weights.training):
                made = self._fp16_arguments(trainer, weights, facts)
                if made is not None:
                    notes = (
                        Note("trained here", trainer.span, facts.elsewhere(trainer)),
                        Note("`fp16=True` is set here", made.span),
                    )
                    expr = facts.short(weights.event.call.func)
                    yield self.at(weights.event, expr=expr, notes=notes)
                    break

    def _only_evaluates(self, facts: Facts) -> bool:
        """True if the file only evaluates or predicts with its Trainers."""
        return "train" not in facts.calls and bool(facts.calls.keys() & {"evaluate", "predict"})

    def _fp16_arguments(self, trainer: Call, weights: Weights, facts: Facts) -> Call | None:
        """Return the call of the Trainer's arguments if `fp16=True` is certain when the weights are FP16."""
        given = trainer.argument(1, "args")
        made = facts.optimizers.arguments(given, trainer) if given is not None else None
        fp16 = made.keywords.get("fp16") if made is not None else None
        if made is None or fp16 is None:
            return None
        for each in facts.evaluate(fp16, made):
            is_on = isinstance(each.atom, Constant) and each.atom.value is True
            if is_on and compatible(each.guard, facts.guard_of(made), facts.guard_of(trainer), weights.guard):
                return made
        return None
