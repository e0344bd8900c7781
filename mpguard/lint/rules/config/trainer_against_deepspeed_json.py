from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, Note, any_of, deepspeed_file, validation


class TrainerAgainstDeepspeedJson(ConfigRule, form_of="MPG849"):
    """An axolotl or LLaMA-Factory config names, or has, a DeepSpeed config with another precision, or a wrong one.

    Both pass the file to the Trainer of transformers (5.23), which stops with a ValueError if `bf16.enabled` or
    `fp16.enabled` is a boolean that differs from its own argument; it fills in `"auto"`. LLaMA-Factory 0.9.5 also stops
    with `pure_bf16` under ZeRO-3.

    In a section `deepspeed: {...}` the keys and values at which DeepSpeed stops are reported, too.

    `bf16: auto` of axolotl counts as BF16. The file is searched for in the folder of the config and in the current one.
    """

    message = "`{key}`: {reason}"
    help = 'write `"auto"` for `enabled` in the DeepSpeed file, or the same precision'
    kinds = ("axolotl", "llamafactory")
    triggers = (any_of(b"deepspeed"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        name, section = deepspeed_file.named_file(document), deepspeed_file.inline(document)
        if section is not None:
            for problem in validation.deepspeed_problems(section):
                if (wrong := section.entry(problem.key)) is not None:
                    yield self.at(wrong, key=f"deepspeed.{problem.key}", reason=problem.reason)
        other = self.project.config_named(document.path, name) if name is not None else section
        if other is None or not isinstance(other.data, dict):
            return
        for key, reason in deepspeed_file.mismatches(document, other):
            entry = document.entry(key)
            if entry is not None:
                named = document.entry("deepspeed") if section is None else None
                notes = (Note("the file is named here", named.span),) if named is not None and named != entry else ()
                yield self.at(entry, notes=notes, key=key, reason=reason)
