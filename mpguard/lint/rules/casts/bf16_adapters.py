from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, Dtype, Facts, Note, Rule, adapters, any_of


class Bf16Adapters(Rule, form_of="MPG107"):
    """The parameters of an adapter that train are BF16, like the model that it is added to.

    `get_peft_model` makes adapters FP32. `add_adapter` of diffusers and transformers creates them in the dtype of the
    layers that they are added to (peft 0.21, diffusers 0.40, transformers 5.23), and copies of `modules_to_save` keep
    that of the model. An update below 2^-9 of a weight is rounded away: with a learning rate of 1e-5 nothing above
    0.005 changes, and the end of a cosine schedule trains nothing.

    Not reported: adapters of quantized models, files that cast weights to FP32, and engines that keep FP32 copies.
    """

    message = "{what} BF16, like the model: small updates are rounded away"
    help = "create them in FP32"
    triggers = (
        any_of(b"autocast_adapter_dtype", b"add_adapter(", b"modules_to_save"),
        any_of(b"bfloat16", b"bf16"),
        any_of(b"optim", b"Trainer("),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        low = any(policy.master_dtype is not Dtype.FP32 for policy in facts.project.policies(facts.path))
        if low or facts.may_keep_masters or facts.declared == "inference":
            return
        for each in adapters.in_low_precision(facts, Dtype.BF16, always=False):
            yield self.at(each.call, what=each.what, notes=(Note("BF16 here", each.source.span),), help=each.help)
