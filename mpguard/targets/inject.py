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
    """One key of a config that is not what the policy says. Plain data.

    key: dotted path, such as `fp8_config.backend`; `old` and `new` may be `ABSENT`.
    """

    key: str
    old: Any
    new: Any
    reason: str = ""

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    @property
    def overrides(self) -> bool:
        """Whether somebody's own value is replaced (and not just a missing one given)."""
        return self.old is not ABSENT

    def __str__(self) -> str:
        new = "(removed)" if self.new is ABSENT else show(self.new)
        return f"{self.key}: {show(self.old)} -> {new}" + (f" ({self.reason})" if self.reason else "")


def build(policy: Policy, target: str, strategy: str | None = None) -> Any:
    """`policy.to(target, strategy)`."""
    found = get(target)
    built = found.build(policy, strategy)
    _say_not_carried(found, policy, strategy, stacklevel=4)
    return built


def inject(
    config: Mapping[str, Any], policy: Policy | str, target: str, strategy: str | None = None
) -> tuple[dict[str, Any], list[Change]]:
    """Writes the policy, or that of a recipe's name, into a copy of a target's config.

    Returns the new config and what changed; the given one is left as it is. What replaces a value
    that was there is logged at warning level (logger `mpguard`), with key, old and new value.
    Warns `NotCarried`; raises `PolicyError` where the target makes no sense for the policy or the
    config has a value where a section must be.
    """
    policy = given(policy, "inject")
    if not isinstance(config, Mapping):
        raise PolicyError(f"inject: the config is a {type(config).__name__}; a mapping of keys and values is needed")
    found = get(target)
    changes = differences(config, policy, target, strategy)
    _say_not_carried(found, policy, strategy or found.strategy(config), stacklevel=3)
    for change in changes:
        log.log(logging.WARNING if change.overrides else logging.INFO, "%s: %s", target, change)
    return merged(config, {change.key: Setting(change.new) for change in changes}), changes


def differences(config: Mapping[str, Any], policy: Policy, target: str, strategy: str | None = None) -> list[Change]:
    """What `inject` would change; empty when the policy is in the config already.

    strategy: by default the one that the config itself states.
    """
    return [
        Change(key, old, setting.value, setting.reason)
        for key, setting in get(target).settings_for(config, policy, strategy).items()
        if not setting.met_by(old := lookup(config, key))
    ]


def _say_not_carried(found: Plugin, policy: Policy, strategy: str | None, *, stacklevel: int) -> None:
    """stacklevel: of the user's own line, counted from here."""
    for field in found.not_carried(policy, strategy):
        warnings.warn(NotCarried(field, policy.format_field(field), found.name, carriers(field)), stacklevel=stacklevel)
