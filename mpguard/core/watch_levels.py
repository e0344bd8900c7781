"""How closely a run is watched: `off`, `light` (the default) or `full`."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

from mpguard.core.errors import ConfigError, did_you_mean

WatchLevel = Literal["off", "light", "full"]

WATCH_LEVELS: tuple[str, ...] = get_args(WatchLevel)

#: What is used where nothing else is set.
DEFAULT_WATCH_LEVEL: WatchLevel = "light"


def watch_level(value: Any) -> WatchLevel:
    """Return a level as it is written in a config or on a command line. Raises `ConfigError` for another value.

    YAML reads an unquoted `off` as False.
    """
    if value is False:
        return "off"
    if value not in WATCH_LEVELS:
        hint = did_you_mean(value, WATCH_LEVELS) if isinstance(value, str) else ""
        raise ConfigError(f"watch is {value!r}; it must be one of {', '.join(WATCH_LEVELS)}{hint}")
    return cast(WatchLevel, value)
