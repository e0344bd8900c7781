from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.lint import ConfigRule, Diagnostic, Note, any_of, axolotl_keys, did_you_mean, show

if TYPE_CHECKING:
    from mpguard.lint import Document, Entry


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
        section = document.entry("fp8_config")
        if section is not None and section.value is not None:
            yield from self._fp8(document, section)
        norms = axolotl_keys.is_on(document, "fp32_norms")
        classes = document.entry("fp32_norm_classes")
        if norms is not None:
            fsdp = document.entry("fsdp_config")
            if not axolotl_keys.is_fsdp2(document) or fsdp is None or fsdp.value is None:
                yield self.at(
                    norms,
                    what="`fp32_norms` requires FSDP2, `fsdp_version: 2` with an `fsdp_config`: axolotl stops",
                    help="set both, or remove the key",
                )
        elif classes is not None and classes.value:
            yield self.at(
                classes,
                what="`fp32_norm_classes` has no effect without `fp32_norms: true`",
                help="set `fp32_norms: true`, or remove the key",
                severity="warning",
            )

    def _fp8(self, document: Document, section: Entry) -> Iterator[Diagnostic]:
        if not document.data.get("fp8"):
            yield self.at(
                section, what="`fp8_config` without `fp8: true`: axolotl stops", help="set `fp8: true`, or remove it"
            )
        if not isinstance(section.value, dict):
            yield self.at(section, what=f"`fp8_config` is {show(section.value)}: a section with `recipe` is needed")
            return
        for key in section.value:
            if key not in axolotl_keys.FP8_KEYS and (entry := document.entry(f"fp8_config.{key}")) is not None:
                hint = did_you_mean(str(key), axolotl_keys.FP8_KEYS)
                yield self.at(entry, what=f"`fp8_config.{key}`: axolotl has no such key, and stops{hint}")
        recipe = document.entry("fp8_config.recipe")
        if recipe is None or (isinstance(recipe.value, str) and any(mark in recipe.value for mark in "${<")):
            return
        if recipe.value not in axolotl_keys.FP8_RECIPES:
            hint = did_you_mean(str(recipe.value), axolotl_keys.FP8_RECIPES)
            yield self.at(recipe, what=f"`fp8_config.recipe` is {show(recipe.value)}, which axolotl refuses{hint}")
        gather = axolotl_keys.is_on(document, "fp8_enable_fsdp_float8_all_gather")
        if gather is not None and recipe.value in axolotl_keys.FP8_RECIPES[1:]:
            notes = (Note("the recipe", recipe.value_span),)
            yield self.at(gather, notes=notes, what=f"float8 all-gather with `recipe: {recipe.value}`: axolotl stops")
