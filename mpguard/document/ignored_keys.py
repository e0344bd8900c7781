"""The keys of precision that a program ignores without a message, for explain, apply and launch alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mpguard.document import Document, mp_yaml
from mpguard.document.dialects import PRECISION
from mpguard.document.newer import may_be_new
from mpguard.document.schemas import accelerate, axolotl, deepspeed, nemo
from mpguard.document.values import ConfigProblem, misspelling_of


def ignored(document: Document) -> Iterator[ConfigProblem]:
    """Yield the keys that the program of a config ignores: unknown ones, and those that another key replaces.

    Of the unknown keys only those whose names speak of precision, or are misspellings.
    """
    if document.kind == "accelerate":
        yield from _accelerate(document)
    elif document.kind == "deepspeed":
        yield from of_deepspeed(document)
    elif document.kind == "axolotl" and axolotl.is_on(document, "fp16") and axolotl.is_on(document, "bf16"):
        yield ConfigProblem("fp16", "`bf16` is true as well, and wins")
    elif document.kind == "nemo":
        e4m3, hybrid = (document.entry(f"model.{key}") for key in nemo.FORMATS)
        if e4m3 is not None and hybrid is not None and e4m3.value is True and hybrid.value is True:
            yield ConfigProblem("model.fp8_hybrid", "`fp8_e4m3` is true as well, and wins")


def of_deepspeed(document: Document) -> Iterator[ConfigProblem]:
    """Yield the keys of a DeepSpeed config that DeepSpeed ignores. In its strict sections it stops at them."""
    title = f"DeepSpeed {deepspeed.VERSION}"
    for entry in document.entries():
        name = entry.path[0]
        if len(entry.path) == 1:
            known: Collection[str] = deepspeed.KEYS
        elif len(entry.path) == 2 and name in deepspeed.SECTIONS and name not in deepspeed.STRICT:
            known = deepspeed.SECTIONS[name]
        else:
            continue
        meant = deepspeed.RENAMED.get(entry.key) or misspelling_of(entry.key.lower(), known, 0.88)
        if entry.key not in known and _is_of_interest(entry.key, meant):
            yield _unknown(".".join(entry.path), "deepspeed", title, meant)


def _accelerate(document: Document) -> Iterator[ConfigProblem]:
    for entry in document.entries():
        section = accelerate.SECTIONS.get(entry.path[0]) if len(entry.path) == 2 else None
        if section is None or section.bare(entry.key) in section.keys or entry.key in mp_yaml.KEYS:
            continue
        if not section.prefix and entry.key in accelerate.ARGUMENTS:
            continue
        bare = section.bare(entry.key)
        meant = section.renamed.get(bare) or misspelling_of(bare, section.keys, 0.88)
        of_interest = section is accelerate.FP8 or _is_of_interest(bare, meant)
        if of_interest and not entry.key.startswith("mpguard"):  # which a launch refuses
            meant = meant and entry.key.removesuffix(bare) + meant
            yield _unknown(".".join(entry.path), "accelerate", f"accelerate {accelerate.VERSION}", meant)


def _is_of_interest(key: str, meant: str | None) -> bool:
    speaks = PRECISION.search(key) or "dtype" in key or "data_type" in key
    return key[:1].isalpha() and "comment" not in key.lower() and bool(meant or speaks)


def _unknown(key: str, kind: str, title: str, meant: str | None) -> ConfigProblem:
    hint = f"; did you mean `{meant}`?" if meant else ""
    why = may_be_new("key", kind) or f"{title} has no such key, and ignores it"
    return ConfigProblem(key, f"{why}{hint}", unknown=True)
