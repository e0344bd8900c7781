"""Settings: what a target's config must contain, as plain data, and how they are merged into a config."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mpguard.core.errors import PolicyError


class _Absent:
    """The value of a key that is absent, or must be."""

    def __repr__(self) -> str:
        return "(absent)"

    def __copy__(self) -> _Absent:
        return self

    def __deepcopy__(self, memo: object) -> _Absent:
        return self

    def __reduce__(self) -> str:
        return "ABSENT"  # pickle keeps the one object


ABSENT = _Absent()


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value that a config must contain, the reason, and which other spellings have the same meaning.

    value: plain data, or `ABSENT` for a key that must be absent.
    reason: a clause for the change line, such as "accelerate would reduce in bf16".
    equivalent: returns True for a found value that means `value`; by default, equality of value and type.
    default: what the target uses if the key is missing; `ABSENT` if it has no fixed default.
    """

    value: Any
    reason: str = ""
    equivalent: Callable[[Any], bool] | None = None
    default: Any = ABSENT

    def implied(self, found: Any) -> bool:
        """True if a key is missing and the target's default means `value`."""
        return found is ABSENT and self.default is not ABSENT and self.met_by(self.default)

    def met_by(self, found: Any) -> bool:
        """True if a value found in a config already means `value`."""
        if self.equivalent is not None and found is not ABSENT:
            return self.equivalent(found)
        return _equal(found, self.value)


def _equal(found: Any, wanted: Any) -> bool:
    """True if two values are equal, where True differs from 1, and 1 does not differ from 1.0."""
    if found is ABSENT or wanted is ABSENT:
        return found is wanted
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_equal, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_equal(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


#: Dotted path -> the value that the target's config must contain there (a `Setting` to give a reason).
Settings = Mapping[str, Any]


def show(value: Any) -> str:
    """Return a plain value as a config file writes it: `true`, `null`, `bf16`."""
    if value is ABSENT:
        return "(absent)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_item, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_item(each)}' for key, each in value.items())}}}"
    return "null" if value is None else str(value)


def _item(value: Any) -> str:
    """Return an item of a list; in quotes where YAML would take its first character for syntax, as in `*lm_head`."""
    text = show(value)
    return f'"{text}"' if isinstance(value, str) and text[:1] in "*&!%@`>|{}[],#?:-\"'" else text


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted path, or `ABSENT`."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
        node = node[part]
    return node


def merged(config: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return a deep copy of `config` with the settings in it.

    Missing sections are created, and sections that become empty are removed. Raises `PolicyError` where the config
    has a value in the place of a section.
    """
    result = copy.deepcopy(dict(config))
    for key, setting in settings.items():
        *parents, last = key.split(".")
        if setting.value is ABSENT:
            _remove(result, parents, last)
            continue
        node = result
        for depth, part in enumerate(parents):
            inner = node.setdefault(part, {})
            if inner is None:
                inner = node[part] = {}
            if not isinstance(inner, dict):
                where = ".".join(parents[: depth + 1])
                raise PolicyError(f"`{where}` is {show(inner)}; a section is needed there, to hold `{last}`. Remove it")
            node = inner
        node[last] = copy.deepcopy(setting.value)
    return result


def _remove(config: dict[str, Any], parents: list[str], last: str) -> None:
    chain = [config]
    for part in parents:
        inner = chain[-1].get(part)
        if not isinstance(inner, dict):
            return
        chain.append(inner)
    chain[-1].pop(last, None)
    for part, outer, inner in zip(reversed(parents), reversed(chain[:-1]), reversed(chain[1:]), strict=True):
        if not inner:
            del outer[part]
