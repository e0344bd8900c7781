from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import HALF_DTYPES, Diagnostic, Dtype, Facts, Note, Rule, any_of, own_optimizers


class CopiesKeepDtype(Rule, form_of="MPG107"):
    """An optimizer updates copies of 16-bit weights that have the dtype of the weights.

    `clone`, `detach`, `deepcopy` and `.data` keep the dtype: master weights are copies in FP32,
    `p.detach().clone().float()`. They are followed through lists, functions and files to a model in one 16-bit dtype.
    """

    message = "`{expr}` copies {dtype} weights in {dtype}, and a plain optimizer updates the copies"
    help = "copy them in FP32: `p.detach().clone().float()`"
    triggers = (any_of(b"clone(", b"deepcopy("), any_of(b"optim", b"Adam", b"SGD"))
    triggers_nearby = (
        any_of(b"bfloat16", b"bf16", b"DTYPE", b"getattr(torch", b"float16", b"half"),
        any_of(b".step("),
        any_of(b"arameters()"),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        policies = facts.project.policies(facts.path)
        if facts.declared == "inference" or any(each.master_dtype is not Dtype.FP32 for each in policies):
            return
        for dtype in HALF_DTYPES:
            for copy, optimizer, source in own_optimizers.copied_weights(facts, dtype):
                weights = Note(f"the weights are {dtype.label} here", source.span, facts.elsewhere(source.call))
                notes = (weights, Note("the optimizer", optimizer.span))
                yield self.at(copy, expr=facts.short(copy.node), dtype=dtype.label, notes=notes)
