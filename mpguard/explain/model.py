"""The parts of an explanation, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

SettingLayer = Literal[
    "recipe", "override", "YAML", "DeepSpeed JSON", "launch flag", "environment", "TrainingArguments", "code",
    "default", "proof",
]  # fmt: skip


class UnknownValue(str):
    """A value that only the running script knows, as text: `unknown: args.precision`."""

    @property
    def expression(self) -> str:
        """The expression that has the value, in backticks; `it` if there is no text of it."""
        text = self.removeprefix("unknown: ")
        return f"`{text}`" if text and text != self else "it"


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value is written. file: None for the environment, a command line and a library's default.

    name: of the variable or the flag.
    """

    layer: SettingLayer
    file: str | None = None
    line: int | None = None
    name: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else self.file or self.name
        return f"{place} ({self.layer})" if place else self.layer


DEFAULT = Origin("default")


@dataclasses.dataclass(frozen=True)
class Given:
    """A value as it is written, and where. name: the key as it is written there, if callers need it."""

    value: Any
    origin: Origin
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A value that a setting might have.

    reason: why it is used before the claims after it. lost: why it is never used, whatever the other claims are.
    """

    value: Any
    origin: Origin
    reason: str = ""
    lost: str = ""


@dataclasses.dataclass(frozen=True)
class ShadowedValue:
    """A value that has no effect, and why."""

    value: Any
    origin: Origin
    why: str


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A setting in force."""

    key: str
    value: Any
    origin: Origin
    shadowed: tuple[ShadowedValue, ...] = ()

    def has_value_of(self, other: ShadowedValue) -> bool:
        """True if a value that has no effect is the one in force."""
        return (
            not isinstance(self.value, UnknownValue)
            and type(self.value) is type(other.value)
            and self.value == other.value
        )


@dataclasses.dataclass(frozen=True)
class UnreadKey:
    """A key that nothing reads in this run. file: None for an environment variable and a flag of a command line."""

    key: str
    origin: Origin
    why: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The settings of a run, the keys that nothing reads, and the reasons why the run would stop before it trains.

    title: what was explained, in one line. notes: what the reader should know about how it was determined.
    """

    title: str
    settings: tuple[Resolved, ...]
    unread: tuple[UnreadKey, ...] = ()
    stops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def get(self, key: str) -> Resolved | None:
        """Return a setting by its key; None if the run does not have it."""
        return next((each for each in self.settings if each.key == key), None)

    def as_json(self) -> dict[str, Any]:
        """Return the explanation as plain data, in the form of `--format json`."""
        return {
            "version": 1,
            "settings": [
                {
                    "key": each.key,
                    "value": each.value,
                    "source": _origin(each.origin),
                    "shadowed": [
                        {"value": other.value, "source": _origin(other.origin), "why": other.why}
                        for other in each.shadowed
                    ],
                }
                for each in self.settings
            ],
            "unread": [{"key": each.key, "file": each.origin.file, "line": each.origin.line} for each in self.unread],
        }


def _origin(origin: Origin) -> dict[str, Any]:
    return {"layer": origin.layer, "file": origin.file, "line": origin.line}


def resolve(key: str, claims: Iterable[Claim]) -> Resolved:
    """Return a setting: the first claim that can be used is in force, all others are shadowed by it."""
    claims = list(claims)
    winner = next(each for each in claims if not each.lost)
    shadowed = [
        ShadowedValue(each.value, each.origin, each.lost or winner.reason) for each in claims if each is not winner
    ]
    return Resolved(key, winner.value, winner.origin, tuple(s for s in shadowed if s.origin != DEFAULT))
