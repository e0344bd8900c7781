"""What is wrong with an accelerate config, for lint, explain and launch alike: the keys and values that launch refuses.

Nothing is imported: the keys are those of the committed table. `mpguard launch` asks an accelerate of another version
for its own keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mpguard.core.errors import ConfigError, did_you_mean
from mpguard.document import Document, mp_yaml
from mpguard.document.schemas.accelerate import DISTRIBUTED_TYPES, unknown_key
from mpguard.targets.settings import show

#: Keys whose value is a number from 1.
COUNTS = ("num_processes", "num_machines")
#: Characters of a value that a template fills in.
_TEMPLATE = "${<"


@dataclasses.dataclass(frozen=True)
class ConfigProblem:
    """A key that is refused. reason: a clause, with the remedy. unknown: accelerate does not have the key."""

    key: str
    reason: str
    unknown: bool = False

    def message(self, document: Document) -> str:
        """Return the text of an error: the place, the key, and the reason."""
        return f"{document.where(self.key)}: {self.reason}"


def problems(document: Document) -> Iterator[ConfigProblem]:
    """Yield what is wrong with an accelerate config: unknown top-level keys first, then values.

    mpguard's own keys are read by `mp_yaml.stored`, which raises `ConfigError`; see `own_keys`.
    """
    config = document.require()
    sagemaker = config.get("compute_environment") == "AMAZON_SAGEMAKER"
    for key in config:
        if (hint := unknown_key(str(key), sagemaker)) is not None:
            yield ConfigProblem(str(key), f"accelerate has no such key{hint}", unknown=True)
    if not sagemaker:
        yield from wrong_values(config)


def wrong_values(config: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Yield the values that no launch can use."""
    kind = config.get("distributed_type")
    if isinstance(kind, str) and kind not in DISTRIBUTED_TYPES and not _filled_in(kind):
        meant = did_you_mean(kind.upper(), DISTRIBUTED_TYPES) or f"; it is one of {', '.join(DISTRIBUTED_TYPES)}"
        yield ConfigProblem("distributed_type", f"accelerate has no `{kind}`{meant}")
    for key in COUNTS:
        value = config.get(key)
        valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if value is not None and not valid and not _filled_in(value):
            yield ConfigProblem(key, f"is {show(value)}; a number from 1 is needed")


def own_keys(document: Document) -> str | None:
    """Return what is wrong with mpguard's keys in a config, with the place; None if nothing is."""
    try:
        mp_yaml.stored(document)
    except ConfigError as error:
        return str(error)
    return None


def _filled_in(value: object) -> bool:
    """True for a value that a template fills in before accelerate reads it."""
    return isinstance(value, str) and any(mark in value for mark in _TEMPLATE)
