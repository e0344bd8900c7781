from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import ConfigRule, Diagnostic, Document, Note, any_of, may_be_new, schemas


class AxolotlFp8Config(ConfigRule, form_of="MPG849"):
    """`fp8_config` or `fp32_norms` of an axolotl config, in a form that axolotl refuses or ignores.

    axolotl 0.19.0 stops at the start of a run if

    - `fp8_config` has another key than `recipe`, or a recipe that it does not have;
    - `fp8_config` is set without `fp8: true`;
    - `fp8_enable_fsdp_float8_all_gather` is on with a rowwise recipe, of which torchao gathers no weights;
    - `fp32_norms` is on without `fsdp_version: 2` and an `fsdp_config`.

    `fp32_norm_classes` without `fp32_norms` is ignored, with a warning.

    Values that a template fills in are unknown.
    """

    message = "{what}"
    help = "`recipe: tensorwise` is the default; rowwise recipes have no float8 all-gather"
    kinds = ("axolotl",)
    triggers = (any_of(b"fp8_config", b"fp32_norm"),)

    def check(self, document: Document) -> Iterator[Diagnostic]:
        for each in schemas.axolotl.section_refusals(document):
            notes = () if each.other is None else (Note("the recipe", each.other.value_span),)
            new = may_be_new(each.lacks, "axolotl") if each.lacks else None
            what = f"`{each.key}`: {new or each.reason}"
            yield self.at(each.entry, notes=notes, what=what, help=each.help, severity="warning" if new else None)
        classes = document.entry("fp32_norm_classes")
        if classes is not None and classes.value and schemas.axolotl.is_on(document, "fp32_norms") is None:
            yield self.at(
                classes,
                what="`fp32_norm_classes` has no effect without `fp32_norms: true`",
                help="set `fp32_norms: true`, or remove the key",
                severity="warning",
            )
