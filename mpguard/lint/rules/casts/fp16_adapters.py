from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, Dtype, Facts, Fix, Note, Rule, adapters, any_of, python_edits


class Fp16Adapters(Rule, form_of="MPG103"):
    """The parameters of an adapter that train are FP16, like the model that it is added to.

    `get_peft_model` makes adapters of an FP16 or BF16 model FP32, unless the argument is False. `add_adapter` does not,
    and copies of `modules_to_save` keep the dtype of the model. FP16 parameters have FP16 gradients, which the
    GradScaler refuses: "Attempting to unscale FP16 gradients" (peft 0.21, transformers 5.23, torch 2.13, observed).
    Without a scaler they underflow.

    Not reported: adapters of quantized models, which are FP32 anyway, models from other files, files without training,
    and files that cast weights to FP32 or call `prepare_model_for_kbit_training`, which does. (Before peft 0.3
    `prepare_model_for_int8_training` did not.)
    """

    message = "{what} FP16, like the model: GradScaler cannot unscale their gradients"
    help = "create them in FP32"
    triggers = (
        any_of(b"autocast_adapter_dtype", b"add_adapter(", b"modules_to_save"),
        any_of(b"float16", b".half", b"fp16"),
    )
    fixes = True

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        for each in adapters.in_low_precision(facts, Dtype.FP16, always=True):
            fix = None
            if each.argument is not None:
                edit = python_edits.without_argument(each.call, each.argument)
                fix = Fix("Create them in FP32", "safe", (edit,))
            notes = (Note("FP16 here", each.source.span),)
            yield self.at(each.call, what=each.what, notes=notes, help=each.help, fix=fix)
