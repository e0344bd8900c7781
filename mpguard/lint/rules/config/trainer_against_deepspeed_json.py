from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, Note, any_of, deepspeed_file


class TrainerAgainstDeepspeedJson(ConfigRule, form_of="MPG849"):
    """An axolotl or LLaMA-Factory config names a DeepSpeed file that has another precision.

    Both pass the file to the Trainer of transformers (5.23), which stops with a ValueError if `bf16.enabled` or
    `fp16.enabled` is a boolean that differs from its own argument; it fills in `"auto"`. LLaMA-Factory 0.9.5 also stops
    with `pure_bf16` under ZeRO-3.

    `bf16: auto` of axolotl counts as BF16. The file is searched for in the folder of the config and in the current one.
    """

    message = "`{key}`: {reason}"
    help = 'write `"auto"` for `enabled` in the DeepSpeed file, or the same precision'
    kinds = ("axolotl", "llamafactory")
    triggers = (any_of(b"deepspeed"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        name = deepspeed_file.named_file(document)
        other = self.project.config_named(document.path, name) if name is not None else None
        if other is None or not isinstance(other.data, dict):
            return
        for key, reason in deepspeed_file.mismatches(document, other):
            entry = document.entry(key)
            if entry is not None:
                named = document.entry("deepspeed")
                notes = (Note("the file is named here", named.span),) if named is not None and named != entry else ()
                yield self.at(entry, notes=notes, key=key, reason=reason)
