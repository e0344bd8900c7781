"""The kinds of values that programs parse in their configs, for checks without the program."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from mpguard.core.errors import did_you_mean, near
from mpguard.targets.settings import show

if TYPE_CHECKING:
    from mpguard.document import Document

#: Characters of a value that a template fills in.
_TEMPLATE = "${<"
#: The words that pydantic, YAML 1.1 and accelerate parse as booleans.
BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0"})


@dataclasses.dataclass(frozen=True)
class ValueKind:
    """A kind of values.

    needed: a clause for messages. parses: True for a value that the program can parse. words: the values, where they
    are a list, which another version of the program may extend.
    """

    needed: str
    parses: Callable[[Any], bool]
    words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ConfigProblem:
    """A key that is refused. reason: a clause, with the remedy. unknown: the program does not have the key.

    listed: its value is not in a list of the known ones. undecided: a newer program is installed, which may have it.
    flag: the flag of `accelerate launch` that replaces the key; `mixed_precision` also for what a policy replaces.
    unless: the flags of which each removes the problem, where a key is missing: a file alone does not show them.
    """

    key: str
    reason: str
    unknown: bool = False
    flag: str = ""
    listed: bool = False
    undecided: bool = False
    unless: tuple[str, ...] = ()

    def is_removed_by(self, flags: Collection[str]) -> bool:
        """Return True if a flag of the launch replaces the key, or gives what is missing. flags: their names."""
        return self.flag in flags or any(each in flags for each in self.unless)

    @property
    def severity(self) -> Literal["warning"] | None:
        """The severity of a finding, where it is not that of the rule."""
        return "warning" if self.undecided else None

    @property
    def hint(self) -> str:
        """The clause with the names that may be meant; empty without one."""
        place = self.reason.find("; did you mean")
        return self.reason[place:] if place >= 0 else ""

    def message(self, document: Document) -> str:
        """Return the text of an error: the place, the key, and the reason."""
        return f"{document.where(self.key)}: {self.reason}"


def is_filled_in(value: object) -> bool:
    """Return True for text with the marks of a template, which is not known before a run."""
    return isinstance(value, str) and any(mark in value for mark in _TEMPLATE)


def _switch(value: Any) -> bool:
    return value in (0, 1) if isinstance(value, (bool, int, float)) else str(value).lower() in BOOLEAN_WORDS


def number(value: Any) -> float | None:
    """Return the number that a value is or spells; None for another value, a boolean too."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _whole(value: Any) -> bool:
    found = number(value)
    return found is not None and math.isfinite(found) and found == int(found)


def _scale(value: Any) -> bool:
    found = number(value)
    return found is not None and math.isfinite(found) and found >= 0


def one_of(*words: str, fold: bool = False, also: tuple[Any, ...] = ()) -> ValueKind:
    """Return the kind of the values that are one of some words. fold: in upper or lower case. also: other values."""

    def parses(value: Any) -> bool:
        return (value.lower() if fold else value) in words if isinstance(value, str) else value in also

    return ValueKind(f"it is one of {', '.join(words)}", parses, words)


BOOLEAN = ValueKind("true or false is needed: text counts as true", lambda value: isinstance(value, (bool, int)))
SWITCH = ValueKind("true or false is needed", _switch)
SWITCH_OR_AUTO = ValueKind("auto, true or false is needed", lambda value: value == "auto" or _switch(value))
#: Of a program that converts no text: text that reads as true is what it says.
TRUTHY = ValueKind(
    BOOLEAN.needed, lambda value: isinstance(value, (bool, int)) or str(value).lower() in ("true", "yes", "on", "1")
)
WHOLE = ValueKind("a whole number is needed", _whole)
INTEGER = ValueKind(
    "a whole number without quotes is needed", lambda value: _whole(value) and not isinstance(value, str)
)
SCALE = ValueKind("a number from 0 is needed", _scale)
WHOLE_FROM_0 = ValueKind("a whole number from 0 is needed", lambda value: _whole(value) and _scale(value))
SECTION = ValueKind("a section is needed", lambda value: isinstance(value, Mapping))


def wrong_values(
    document: Document, kinds: Mapping[str, ValueKind], absent: tuple[Any, ...] = (None,)
) -> Iterator[ConfigProblem]:
    """Yield the keys whose values their program cannot parse.

    kinds: dotted key -> the kind of its value. absent: values that stand for no value.
    Values that a template fills in, and those that are unknown in Python code, are not checked.
    """
    for key, kind in kinds.items():
        entry = document.entry(key)
        if entry is None or entry.value in absent or is_filled_in(entry.value):
            continue
        value = entry.value
        if not isinstance(value, (bool, int, float, str, list, dict)) or kind.parses(value):
            continue
        meant = did_you_mean(value, kind.words) if isinstance(value, str) and near(value, kind.words) else ""
        written = f'the text "{value}"' if kind is BOOLEAN and isinstance(value, str) else show(value)
        listed = bool(kind.words) and isinstance(value, str)
        yield ConfigProblem(key, f"is {written}{meant or f'; {kind.needed}'}", listed=listed)


def misspelling_of(key: str, known: Collection[str], cutoff: float = 0.9) -> str | None:
    """Return the known key of which another one is clearly a misspelling; None if none is, or more than one may be.

    Its letters are swapped, or it is similar. cutoff: the similarity that is needed, from 0 to 1, as in
    `difflib.get_close_matches`.
    """
    if key in known:
        return None
    letters = sorted(key.replace("_", ""))
    swapped = next((each for each in sorted(known) if sorted(each.replace("_", "")) == letters), None)
    close = difflib.get_close_matches(key, known, 2, cutoff)
    return swapped or (close[0] if len(close) == 1 else None)
