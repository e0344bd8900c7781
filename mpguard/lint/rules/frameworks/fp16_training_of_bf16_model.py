from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Call, Diagnostic, Dtype, Event, Facts, Note, Rule, any_of, compatible


class Fp16TrainingOfBf16Model(Rule, form_of="MPG519"):
    """`TrainingArguments(fp16=True)` with a model that is loaded in BF16.

    `fp16=True` runs FP16 autocast, which casts the BF16 weights to FP16 for each matmul. The activations have the
    range of FP16 and the weights the precision of BF16: the worst of both. Models that were trained in BF16 overflow,
    and the GradScaler then skips their steps.

    Not reported for arguments and models that are created in other files.
    """

    severity = "error"
    message = "`{expr}` loads the model in BF16, and the Trainer computes in FP16"
    help = "pass `bf16=True` in place of `fp16=True`, or load the model in the other dtype"
    triggers = (
        any_of(b"bfloat16", b"bf16"),
        any_of(b"fp16"),
        any_of(b"from_pretrained("),
        any_of(b"Trainer("),
    )
    yields_to = ("MPG107",)

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        for event in facts.events("trainer"):
            trainer = event.call
            given, model = trainer.argument(1, "args"), trainer.argument(0, "model")
            made = facts.optimizers.arguments(given, trainer) if given is not None else None
            if made is None or model is None or not self._is_fp16(made, facts):
                continue
            records = set(facts.flow.backward(model, trainer))
            for load in facts.events("load"):
                if load.call in records and self._is_bf16(load, made, facts):
                    notes = (Note("`fp16=True` is set here", made.span),)
                    yield self.at(load, expr=facts.short(load.call.func), notes=notes)

    def _is_fp16(self, made: Call, facts: Facts) -> bool:
        values = facts.constants(made.keywords.get("fp16"), made)
        return bool(values) and all(value is True for value in values)

    def _is_bf16(self, load: Event, made: Call, facts: Facts) -> bool:
        """True if a load is BF16 in every case, nothing casts next to it, and the program makes the arguments too."""
        together = compatible(facts.guard_of(load.call), facts.guard_of(made))
        calls = (*(each.call for each in facts.events("cast")), *facts.calls.get("float", ()))
        casts = any(each.scope is load.scope for each in calls)
        return together and not casts and {dtype for _, dtype in load.dtypes} == {Dtype.BF16}
