"""The precision keys of an axolotl YAML, their values, and queries that rules need. From axolotl 0.19.0.

Source: its `utils/schemas/config.py`, `fp8.py`, `validation.py` and `utils/config/__init__.py`. axolotl cannot be
installed together with the other libraries of the tests; `bf16` is tested on the type that its schema declares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mpguard.core.errors import did_you_mean
from mpguard.document.values import (
    BOOLEAN_WORDS,
    SWITCH,
    SWITCH_OR_AUTO,
    WHOLE,
    ConfigProblem,
    ValueKind,
    is_filled_in,
    wrong_values,
)
from mpguard.targets.settings import show

if TYPE_CHECKING:
    from mpguard.document import Document, Entry

VERSION = "0.19.0"
#: The text that `bf16: Literal["auto"] | bool | None` accepts: `auto`, and what pydantic converts to a boolean.
BF16_WORDS = BOOLEAN_WORDS | {"auto"}
#: Activation checkpointing in `fsdp_config`, under either name.
CHECKPOINTING = ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")
#: The values of `fp8_config.recipe`; the first is the default, and the only one with a float8 all-gather.
FP8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: The switch of the float8 all-gather.
GATHER = "fp8_enable_fsdp_float8_all_gather"
#: The keys of `fp8_config`, in which others are refused (`extra="forbid"`).
FP8_KEYS = frozenset({"recipe"})
#: The classes that `fp32_norms` keeps in FP32 without `fp32_norm_classes`.
FP32_NORM_CLASSES = ("RMSNorm", "LayerNorm")
#: The top-level keys whose names speak of precision, with those of its integrations (`integrations/*/args.py`).
KEYS = frozenset({
    "bf16", "fp16", "fp8", "fp8_config", "fp8_enable_fsdp_float8_all_gather", "bfloat16", "float16", "float32", "tf32",
    "fp32_norms", "fp32_norm_classes", "embeddings_skip_upcast", "peft_autocast_adapter_dtype", "torch_dtype",
    "torch_compile", "mixed_precision_policy", "dsv4_bf16_all", "dsv4_fp4_grouped_mode", "dsv4_fp8_lora_kernel",
    "dsv4_fp8_nonexpert_mode", "gemma4_fp8_nonexpert", "nvfp4_merge_aware", "nvfp4_merge_aware_start_step",
})  # fmt: skip

#: Key -> the values that the schema accepts there; `bf16` has words of its own.
VALUES: Mapping[str, ValueKind] = {
    **dict.fromkeys(
        ("fp16", "fp8", "bfloat16", "float16", "float32", GATHER, "fp32_norms", "embeddings_skip_upcast",
         "peft_autocast_adapter_dtype"),
        SWITCH,
    ),
    "tf32": SWITCH_OR_AUTO,
    "torch_compile": SWITCH_OR_AUTO,
    **dict.fromkeys(("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version"), WHOLE),
}  # fmt: skip


def is_on(document: Document, key: str) -> Entry | None:
    """Return the entry of a switch that is on; None if it is off or absent."""
    entry = document.entry(key)
    return entry if entry is not None and entry.value is True else None


def fsdp_version(document: Document) -> Entry | None:
    """Return the entry of the FSDP version, at the top level or in `fsdp_config`; None if absent."""
    keys = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    return next((entry for key in keys if (entry := document.entry(key)) is not None), None)


def is_fsdp2(document: Document) -> bool:
    """True if the file selects version 2 of FSDP."""
    entry = fsdp_version(document)
    return entry is not None and str(entry.value) == "2"


@dataclasses.dataclass(frozen=True)
class Refused:
    """A key at which axolotl stops. reason: a clause. help: the remedy, if it is an own one. other: a second entry.

    lacks: `key` or `value`, if the reason is that a list of the known ones does not have it.
    """

    entry: Entry
    reason: str
    help: str | None = None
    other: Entry | None = None
    lacks: str = ""

    @property
    def key(self) -> str:
        return ".".join(self.entry.path)


def refusals(document: Document) -> Iterator[ConfigProblem]:
    """Yield the precision keys at which axolotl stops when it validates the config."""
    bf16 = document.entry("bf16")
    word = bf16.value if bf16 is not None and isinstance(bf16.value, str) else None
    if word is not None and word.lower() not in BF16_WORDS and not is_filled_in(word):
        yield ConfigProblem("bf16", f"is {word}; axolotl stops unless it is auto, true or false", listed=True)
    yield from value_refusals(document)
    gather = is_on(document, GATHER)
    if gather is not None and not is_fsdp2(document):
        yield ConfigProblem(GATHER, "axolotl stops without FSDP2 (`fsdp_version: 2`)")
    for each in section_refusals(document):
        yield ConfigProblem(each.key, each.reason, unknown=each.lacks == "key", listed=each.lacks == "value")


def value_refusals(document: Document) -> Iterator[ConfigProblem]:
    """Yield the values that the schema cannot parse."""
    for each in wrong_values(document, VALUES):
        yield dataclasses.replace(each, reason=f"{each.reason}: axolotl stops")


def section_refusals(document: Document) -> Iterator[Refused]:
    """Yield those of `fp8_config` and `fp32_norms`."""
    section = document.entry("fp8_config")
    if section is not None and section.value is not None:
        yield from _fp8_config(document, section)
    norms, fsdp = is_on(document, "fp32_norms"), document.entry("fsdp_config")
    if norms is not None and (not is_fsdp2(document) or fsdp is None or fsdp.value is None):
        reason = "axolotl stops without FSDP2, `fsdp_version: 2` with an `fsdp_config`"
        yield Refused(norms, reason, "set both, or remove the key")


def _fp8_config(document: Document, section: Entry) -> Iterator[Refused]:
    if not document.data.get("fp8"):
        yield Refused(section, "axolotl stops without `fp8: true`", "set `fp8: true`, or remove it")
    if not isinstance(section.value, dict):
        yield Refused(section, f"is {show(section.value)}; a section with `recipe` is needed")
        return
    for key in section.value:
        if key not in FP8_KEYS and (entry := document.entry(f"fp8_config.{key}")) is not None:
            hint = did_you_mean(str(key), FP8_KEYS)
            yield Refused(entry, f"axolotl {VERSION} has no such key, and stops{hint}", lacks="key")
    recipe = document.entry("fp8_config.recipe")
    if recipe is None or is_filled_in(recipe.value):
        return
    if recipe.value not in FP8_RECIPES:
        hint = did_you_mean(str(recipe.value), FP8_RECIPES)
        yield Refused(recipe, f"is {show(recipe.value)}, which axolotl {VERSION} refuses{hint}", lacks="value")
    gather = is_on(document, GATHER)
    if gather is not None and recipe.value in FP8_RECIPES[1:]:
        yield Refused(
            gather, f"axolotl stops with `recipe: {recipe.value}`, which has no float8 all-gather", other=recipe
        )
