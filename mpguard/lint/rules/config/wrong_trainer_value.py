from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, any_of, schemas, validation

_REFUSALS = {
    "axolotl": schemas.axolotl.value_refusals, "llamafactory": schemas.llamafactory.value_refusals,
    "megatron-bridge": schemas.megatron_bridge.value_refusals, "nemo": schemas.nemo.value_refusals,
}  # fmt: skip


class WrongTrainerValue(ConfigRule, form_of="MPG849"):
    """A value of a precision key that a training program cannot parse, or takes for something else.

    axolotl 0.19.0 stops at a value that is no boolean. LLaMA-Factory 0.9.5 stops at `bf16` together with `fp16`, and
    converts no value, so that `bf16: "false"`, which is text, counts as true; nor do NeMo 1.x and Megatron Bridge.

    Values that a template fills in are unknown.
    """

    message = "`{key}`: {reason}"
    help = "`mpguard apply RECIPE FILE` writes one precision into the file"
    kinds = ("axolotl", "llamafactory", "megatron-bridge", "nemo")
    triggers = (any_of(b"base_model", b"finetuning_type", b"mixed_precision", b"precision"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        kind = str(document.kind)
        for problem in validation.judged(kind, _REFUSALS[kind](document)):
            if (entry := document.entry(problem.key)) is not None:
                yield self.at(entry, severity=problem.severity, key=problem.key, reason=problem.reason)
