"""Write a policy into the config of a target, or build the target's real object from it."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping
from typing import Any

from mpguard.core.errors import NotCarried, PolicyError
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import given
from mpguard.targets.plugin import Plugin, carriers, get
from mpguard.targets.settings import ABSENT, Setting, lookup, merged, show

log = logging.getLogger("mpguard")


@dataclasses.dataclass(frozen=True)
class Change:
    """One key of a config whose value is not what the policy requires. Plain data.

    key: dotted path, such as `fp8_config.backend`. old, new: the values; either may be `ABSENT`.
    reason: why the value is required; empty where the policy's field is the reason.
    implied: the key is missing, and the target's default is the required value. Writing it changes no run.
    """

    key: str
    old: Any
    new: Any
    reason: str = ""
    implied: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        """The key as its parts."""
        return tuple(self.key.split("."))

    @property
    def overrides(self) -> bool:
        """True if a value that was set is replaced; False if a missing one is added."""
        return self.old is not ABSENT

    def __str__(self) -> str:
        new = "(removed)" if self.new is ABSENT else show(self.new)
        return f"{self.key}: {show(self.old)} -> {new}" + (f" ({self.reason})" if self.reason else "")


def build(policy: Policy, target: str, strategy: str | None = None, *, warn: bool = True) -> Any:
    """Return the real object of a target: the implementation of `Policy.to`.

    warn: False where another target may carry a field, and `require_supported` raises where none does. To ignore the
    warning instead would make Python show every other warning again that it has shown.
    """
    found = get(target)
    built = found.build(policy, strategy)
    if warn:
        _warn_not_carried(found, policy, strategy, stacklevel=4)
    return built


def inject(
    config: Mapping[str, Any], policy: Policy | str, target: str, strategy: str | None = None
) -> tuple[dict[str, Any], list[Change]]:
    """Write a policy, given as such or by a recipe's name, into a copy of a target's config.

    Returns the new config and the changes; the given config is not modified. Each change that replaces an existing
    value is logged at warning level (logger `mpguard`), with key, old and new value; an added value at info level.

    strategy: by default the one that the config itself states. Warns `NotCarried` for required fields that the
    target does not carry. Raises `PolicyError` where the policy cannot be expressed for the target, or the config has
    a value in the place of a section.
    """
    policy = given(policy, "inject")
    if not isinstance(config, Mapping):
        raise PolicyError(f"inject: the config is a {type(config).__name__}; a mapping of keys and values is needed")
    found = get(target)
    changes = differences(config, policy, target, strategy)
    _warn_not_carried(found, policy, strategy or found.read_strategy(config), stacklevel=3)
    for change in changes:
        log.log(logging.WARNING if change.overrides else logging.INFO, "%s: %s", target, change)
    return merged(config, {change.key: Setting(change.new) for change in changes}), changes


def differences(config: Mapping[str, Any], policy: Policy, target: str, strategy: str | None = None) -> list[Change]:
    """Return the changes that `inject` would make; empty if the config already has the policy.

    strategy: by default the one that the config itself states.
    """
    return [
        Change(key, old, setting.value, setting.reason, setting.implied(old))
        for key, setting in get(target).settings_for(config, policy, strategy).items()
        if not setting.met_by(old := lookup(config, key))
    ]


def _warn_not_carried(found: Plugin, policy: Policy, strategy: str | None, *, stacklevel: int) -> None:
    """Warn `NotCarried` once, for all fields. stacklevel: of the user's own line, counted from here."""
    values = {field: policy.format_field(field) for field in found.not_carried(policy, strategy)}
    if not values:
        return
    (field, value), *others = values.items()
    able = [name for name in carriers(field) if all(name in carriers(other) for other, _ in others)]
    warnings.warn(NotCarried(field, value, found.name, able, dict(others)), stacklevel=stacklevel)
