"""The files from which a script's parser reads the arguments of its Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from mpguard.document import read
from mpguard.explain.model import Given, Origin, UnknownValue

#: Files of arguments that transformers' HfArgumentParser reads, if they are the only word of a command line.
_ENDINGS = (".json", ".yaml", ".yml")


def of_files(words: Sequence[Given], names: Collection[str], trl: bool) -> dict[str, Given]:
    """Return the arguments that a file sets. names: those that are wanted. trl: TRL's parser reads it.

    TRL's `TrlParser` reads `--config FILE`, before the command line (trl 1.16, `scripts/utils.py`). HfArgumentParser's
    `parse_json_file` and `parse_yaml_file` are called for a file alone. Unknown values if it is not here.
    """
    named = _named(words, trl)
    if named is None:
        return {}
    path = Path(str(named.value))
    document = read(path) if path.is_file() else None
    if document is None or document.problems or not isinstance(document.data, dict):
        unknown = UnknownValue(f"unknown: in {named.value}")
        return {name: dataclasses.replace(named, value=unknown) for name in ("bf16", "fp16") if name in names}
    found = {}
    for name in names:
        entry = document.entry(name)
        if entry is not None:
            line = document.position(entry.key_span[0])[0]
            found[name] = Given(entry.value, Origin("TrainingArguments", document.path, line))
    return found


def _named(words: Sequence[Given], trl: bool) -> Given | None:
    texts = [str(word.value) for word in words]
    if trl and "--config" in texts[:-1]:
        return words[texts.index("--config") + 1]
    return words[0] if len(words) == 1 and texts[0].endswith(_ENDINGS) else None
