from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, any_of, axolotl_keys, llamafactory_keys


class WrongTrainerValue(ConfigRule, form_of="MPG849"):
    """A value of a precision key that axolotl or LLaMA-Factory cannot parse, or takes for something else.

    axolotl 0.19.0 stops at a value that is no boolean. LLaMA-Factory 0.9.5 stops at `bf16` together with `fp16`, and
    converts no value, so that `bf16: "false"`, which is text, counts as true.

    Values that a template fills in are unknown.
    """

    message = "`{key}`: {reason}"
    help = "`mpguard apply RECIPE FILE` writes one precision into the file"
    kinds = ("axolotl", "llamafactory")
    triggers = (any_of(b"base_model", b"finetuning_type"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        keys = llamafactory_keys if document.kind == "llamafactory" else axolotl_keys
        for entry, reason in keys.value_refusals(document):
            yield self.at(entry, key=".".join(entry.path), reason=reason)
