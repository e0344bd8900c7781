"""Configs of training programs: those that mpguard reads by a schema, and those that it knows by name only."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.document import Document, Entry
from mpguard.document.schemas import axolotl, llamafactory, megatron_bridge, nemo
from mpguard.document.values import misspelling_of


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The schema of one program's configs.

    title: the program. version: of the source that the schema is from. keys: the keys whose names speak of precision.
    sections: where such keys are, in addition to the top level. strict: sections of precision alone, with their keys.
    overrides: the file changes a config that is made in Python, so that what it does not set is unknown.
    """

    title: str
    version: str
    keys: frozenset[str]
    sections: tuple[str, ...] = ()
    strict: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    overrides: bool = False

    def entries(self, document: Document) -> Iterator[Entry]:
        """Yield the entries of a config whose names speak of precision, known or not."""
        for entry in document.entries():
            if len(entry.path) == 2 and entry.path[0] in self.strict:
                yield entry
                continue
            inside = len(entry.path) == 2 and entry.path[0] in self.sections
            if not inside and len(entry.path) > 1:
                continue
            misspelt = not isinstance(entry.value, Mapping) and misspelling_of(entry.key, self.keys) is not None
            alike = misspelt or PRECISION.search(entry.key) is not None
            if entry.key in self.keys or alike:
                yield entry

    def unknown(self, document: Document) -> Iterator[Entry]:
        """Yield the entries whose names speak of precision and that the schema does not have."""
        for entry in self.entries(document):
            if entry.key not in (self.strict.get(entry.path[0], self.keys) if len(entry.path) == 2 else self.keys):
                yield entry


#: Names that speak of precision.
PRECISION = lazy_pattern(
    r"(?i)fp\d|bf16|bfloat16|float(?:32|16|8|4)|tf32|mixed_precision|^precision$|autocast|(?:^|_)amp(?:_|$)|loss_scale"
    r"|transformer_engine|amax"
)

#: Target -> the schema of its configs.
DIALECTS: Mapping[str, Dialect] = {
    "axolotl": Dialect(
        "axolotl", axolotl.VERSION, axolotl.KEYS, ("fsdp_config",), strict={"fp8_config": axolotl.FP8_KEYS}
    ),
    "llamafactory": Dialect("LLaMA-Factory", llamafactory.VERSION, llamafactory.KEYS),
    "megatron-bridge": Dialect(
        "Megatron Bridge",
        megatron_bridge.VERSION,
        megatron_bridge.KEYS,
        megatron_bridge.SECTIONS[1:],
        {"mixed_precision": megatron_bridge.FIELDS | {"_target_", "_call_"}},
        overrides=True,
    ),
    "nemo": Dialect("NeMo 1.x", nemo.VERSION, nemo.KEYS, nemo.SECTIONS),
}

#: The programs whose configs mpguard reads, for messages.
KNOWN = "accelerate, DeepSpeed, axolotl, LLaMA-Factory, Megatron Bridge, NeMo 1.x"


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


#: Programs that mpguard knows by name only, and what their configs have.
OTHERS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "verl": lambda data: "actor_rollout_ref" in data or {"actor", "rollout", "critic"} <= data.keys(),
    "ms-swift": lambda data: (
        bool({"rlhf_type", "train_type", "tuner_type", "sft_type"} & data.keys())
        and bool({"model", "model_type", "dataset"} & data.keys())
    ),
    "NeMo-RL": lambda data: (
        {"policy", "cluster"} <= data.keys() and bool({"grpo", "sft", "dpo", "rm", "loss_fn"} & data.keys())
    ),
    "torchtitan": lambda data: (
        {"training", "parallelism"} <= data.keys() or ({"job", "training"} <= data.keys() and "metrics" in data)
    ),
    "Lightning": lambda data: (
        "trainer" in data
        and bool({"class_path", "init_args"} & _section(data, "model").keys() or "seed_everything" in data)
    ),
}


def other_program(data: object) -> str | None:
    """Return the name of another program whose config a file is; None if it is none of those."""
    if not isinstance(data, Mapping):
        return None
    return next((name for name, has in OTHERS.items() if has(data)), None)


def other_file(path: Path) -> str | None:
    """Return what a TOML file is, for the end of a message, if it is a config of another program; None otherwise."""
    if path.suffix.lower() != ".toml":
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        name = other_program(tomllib.loads(path.read_text("utf-8")))
    except (OSError, ValueError):
        return None
    return None if name is None else _of(name)


def _of(name: str) -> str:
    return f"is a config of {name}, which mpguard does not read; it reads those of {KNOWN}"


def unread(document: Document) -> str:
    """Return why a config of no known kind cannot be read, for the end of a message."""
    name = other_program(document.data)
    if name is not None:
        return _of(name)
    names = [f"`{key}`" for key in document.data]
    keys = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "none"
    return f"is no config of {KNOWN}, nor one that another plugin recognizes; its keys are {keys}"


def unknown_keys(document: Document, refused: Collection[str] = ()) -> str | None:
    """Return the keys of precision that the schema of a config does not have, as a note; None without any.

    refused: keys that are reported as such, and are left out.
    """
    dialect = DIALECTS.get(document.kind or "")
    keys = [".".join(entry.path) for entry in dialect.unknown(document)] if dialect is not None else []
    found = [f"`{key}`" for key in keys if key not in refused]
    if dialect is None or not found:
        return None
    return f"keys that mpguard does not know: {', '.join(found)} (its schema is of {dialect.title} {dialect.version})"
