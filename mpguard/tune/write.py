"""The winner in mp.yaml: its overrides as mpguard's keys, with the figures as a comment; all others are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpguard.core import settings
from mpguard.core.errors import ConfigError
from mpguard.core.text_edits import apply_edits, write_atomically
from mpguard.document import Document, mp_yaml, parse, read
from mpguard.policy.policy import Policy
from mpguard.targets.inject import differences
from mpguard.tune.candidates import TuneCandidate

#: What the comment begins with; a comment of an earlier tuning is replaced.
COMMENT = "# mpguard tune: "


def with_winner(document: Document, winner: TuneCandidate, figures: str, comment: str = COMMENT) -> str:
    """Return the text of a config with a candidate as its policy. figures: what the comment says, after its beginning.

    Raises `ConfigError` if the config cannot be changed so that it has exactly this policy.
    """
    assert winner.policy is not None  # it was measured
    kept = mp_yaml.stored(document)
    recipe = kept.recipe or settings.nearest(Path(document.path)).recipe
    if recipe is None:
        raise ConfigError(f"{document.path}: names no recipe")
    overrides = _overrides(kept.fields, winner.overrides, winner.policy)
    changes = mp_yaml.changes(document.require(), recipe, overrides)
    changes += differences(document.data, winner.policy, "accelerate")
    text = apply_edits(document.text, document.edits(changes))
    if document.format == "yaml":
        text = _with_comment(parse(text, document.path, document.format), figures, comment)
    result = parse(text, document.path, document.format)
    if (mp_yaml.policy_of(result) or winner.policy) != winner.policy:
        raise ConfigError(f"{document.path}: cannot be changed to {winner.name}; set {dict(overrides)} by hand")
    return text


def write(path: Path, winner: TuneCandidate, figures: str, comment: str = COMMENT) -> None:
    """Write a candidate into a config file. Raises `ConfigError`."""
    document = read(path)
    data = document.encoded(with_winner(document, winner, figures, comment))
    try:
        write_atomically(path, data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def _overrides(stored: Mapping[str, Any], winner: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    """Return the overrides of a config with those of the winner; without those that have no effect with them."""
    remaining = {name: value for name, value in stored.items() if name not in winner}
    return {
        **{name: value for name, value in remaining.items() if policy.explicit(name) or not _matters(name, value)},
        **winner,
    }


def _matters(name: str, value: Any) -> bool:
    """True if an override differs from the default, so that it may be refused as one without effect."""
    return bool(value != Policy.__dataclass_fields__[name].default)


def _with_comment(document: Document, figures: str, comment: str) -> str:
    """Return the text with a comment above the line of mpguard's overrides, or of its recipe."""
    entry = document.entry(mp_yaml.OVERRIDES) or document.entry(mp_yaml.RECIPE)
    if entry is None:
        return document.text
    lines = document.text.splitlines(keepends=True)
    at = document.position(entry.key_span[0])[0] - 1
    line = lines[at]
    indent = line[: len(line) - len(line.lstrip())]
    end = line[len(line.rstrip("\r\n")) :] or "\n"
    before = [each for each in lines[:at] if not each.lstrip().startswith(comment)]
    return "".join([*before, f"{indent}{comment}{figures}{end}", *lines[at:]])
