"""The DeepSpeed config that an axolotl or LLaMA-Factory config names or has, which sets the precision a second time.

Both pass it to the Trainer, which compares `bf16.enabled` and `fp16.enabled` with its own arguments and stops if they
differ (`HfTrainerDeepSpeedConfig.trainer_config_process`, transformers 5.23); it fills in "auto".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpguard.core.errors import PolicyError
from mpguard.document import Document, read, validation
from mpguard.document.values import is_filled_in
from mpguard.targets.plugin import get
from mpguard.targets.settings import ABSENT, lookup

#: The kinds of configs with a key `deepspeed`.
KINDS = ("axolotl", "llamafactory")
SWITCHES = ("bf16", "fp16")


def named_file(document: Document) -> str | None:
    """Return the DeepSpeed file that a config names, as written; None without one."""
    name = document.data.get("deepspeed") if document.kind in KINDS else None
    return name if isinstance(name, str) and name and not is_filled_in(name) else None


def inline(document: Document) -> Document | None:
    """Return the section `deepspeed` of a config as a document of its own, with the same positions; None without."""
    node = document.root.target.members.get("deepspeed") if document.kind in KINDS and document.root else None
    if node is None or node.value.target.kind != "mapping":
        return None
    return dataclasses.replace(document, root=node.value)


def read_named(document: Document) -> Document | None:
    """Return the DeepSpeed config that a config has or names; None if it is not here, or cannot be read.

    A relative path is resolved from the current folder, as the programs do, then from the folder of the config.
    """
    if (section := inline(document)) is not None:
        return section
    name = named_file(document)
    for folder in (Path(), Path(document.path).parent) if name is not None else ():
        if (folder / str(name)).is_file():
            found = read(folder / str(name))
            return found if not found.problems and isinstance(found.data, dict) else None
    return None


def arguments(document: Document) -> Mapping[str, bool]:
    """Return `bf16` and `fp16` as the program passes them to the Trainer; without those that are not known."""
    if document.kind == "llamafactory":
        found: Mapping[str, Any] = document.data
    else:
        try:
            found = get(str(document.kind)).read(document.data)
        except PolicyError:
            return {}
    return {name: found.get(name) is True for name in SWITCHES if not is_filled_in(document.data.get(name))}


def mismatches(document: Document, other: Document) -> Iterator[tuple[str, str]]:
    """Yield the keys of a config that the DeepSpeed file contradicts, each with the reason.

    other: the DeepSpeed file, or the section.
    """
    where = "the section `deepspeed`" if is_inline(document, other) else other.path
    for name, own in arguments(document).items():
        key = f"{name}.enabled"
        written = lookup(other.data, key)
        if isinstance(written, bool) and written != own:
            here = name if document.entry(name) is not None else "deepspeed"
            both = f"{name} is {_word(own)} for the Trainer, and `{key}` is {_word(written)} in {where}"
            yield here, f'{both}: the Trainer stops. Write "auto" there'
    pure = document.entry("pure_bf16") if document.kind == "llamafactory" else None
    if pure is not None and pure.value is True and lookup(other.data, "zero_optimization.stage") == 3:
        yield "pure_bf16", f"LLaMA-Factory stops with ZeRO-3, which {where} selects. Use `bf16`, or ZeRO-2"


def refusals(document: Document, other: Document) -> Iterator[str]:
    """Yield the messages of what stops a run with a DeepSpeed config: what it contradicts, and its own wrong keys.

    other: the DeepSpeed file, or the section.
    """
    yield from (f"{document.where(key)}: {reason}" for key, reason in mismatches(document, other))
    for problem in validation.deepspeed_problems(other):
        key = f"deepspeed.{problem.key}"
        yield f"{document.where(key)}: {problem.reason}" if is_inline(document, other) else problem.message(other)


def is_inline(document: Document, other: Document) -> bool:
    """True if the DeepSpeed config is the section of the config itself."""
    return other.path == document.path


def in_force(document: Document, other: Document) -> Iterator[tuple[str, bool, bool]]:
    """Yield DeepSpeed's switches with their values, and True for those that the Trainer fills in for "auto"."""
    own = arguments(document)
    for name in SWITCHES:
        written = lookup(other.data, f"{name}.enabled")
        if written == "auto" and name in own:
            yield f"{name}.enabled", own[name], True
        elif written is not ABSENT and isinstance(written, bool):
            yield f"{name}.enabled", written, False


def _word(value: bool) -> str:
    return str(value).lower()
