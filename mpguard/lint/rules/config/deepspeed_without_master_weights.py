from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, Dtype, any_of

_KEYS = {
    "bf16": "bf16_master_weights_and_grads",
    "bfloat16": "bf16_master_weights_and_grads",
    "fp16": "fp16_master_weights_and_grads",
}


class DeepspeedWithoutMasterWeights(ConfigRule, form_of="MPG107"):
    """A DeepSpeed config asks for master weights in 16 bits (`bf16_master_weights_and_grads`, or `fp16_...`).

    DeepSpeed's ZeRO keeps FP32 master weights by default, and casts them for compute; the key stores them in 16 bits,
    and the optimizer updates that copy without stochastic rounding. It saves 4 bytes per
    parameter.
    """

    message = "`{key}`: ZeRO keeps no FP32 master weights, and Adam's small updates are rounded away"
    help = "remove the key; to save memory, offload the FP32 master weights, or raise the ZeRO stage"
    kinds = ("deepspeed",)
    triggers = (any_of(b"16_master_weights_and_grads"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        if any(policy.master_dtype is not Dtype.FP32 for policy in self.project.policies(document.path)):
            return
        for section, key in _KEYS.items():
            enabled, masters = (document.entry(f"{section}.{name}") for name in ("enabled", key))
            if enabled is not None and enabled.value is True and masters is not None and masters.value is True:
                yield self.at(masters, key=key)
