"""Installed programs that are newer than the tables from which mpguard checks their configs."""

from __future__ import annotations

from collections.abc import Mapping

from mpguard.core.distributions import installed_version
from mpguard.document.schemas import accelerate, axolotl, deepspeed, llamafactory, nemo

#: Kind of config -> the distribution that reads it, its name for messages, and the version of mpguard's table.
SOURCES: Mapping[str, tuple[str, str, str]] = {
    "accelerate": ("accelerate", "accelerate", accelerate.VERSION),
    "deepspeed": ("deepspeed", "DeepSpeed", deepspeed.VERSION),
    "axolotl": ("axolotl", "axolotl", axolotl.VERSION),
    "llamafactory": ("llamafactory", "LLaMA-Factory", llamafactory.VERSION),
    "nemo": ("nemo_toolkit", "NeMo", nemo.VERSION),
}


def may_be_new(what: str, kind: str | None) -> str | None:
    """Return a clause about a key or value that the table of a kind of configs lacks, if it may be new; None otherwise.

    It may be where the program is installed in a newer version than the one that the table is from.
    """
    source = SOURCES.get(kind or "")
    installed = installed_version(source[0]) if source is not None else None
    if source is None or installed is None:
        return None
    from packaging.version import InvalidVersion, Version  # only configs with something unknown need it

    try:
        if Version(installed) <= Version(source[2]):
            return None
    except InvalidVersion:
        return None
    return f"is a {what} that may be new: mpguard knows {source[1]} up to {source[2]}, and {installed} is installed"
