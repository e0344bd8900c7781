"""The errors and warnings of mpguard.

    MpguardError
    ├── PolicyError            precision settings that contradict each other (also a ValueError)
    │   ├── UnknownRecipe      no recipe has that name; lists the similar names
    │   └── NoEffect           a field changes nothing with the other fields; names the field
    ├── ConfigError            a config file that cannot be used: names file, line and key
    │   └── SettingsError      the same for [tool.mpguard]
    ├── MissingExtra           a library that a target needs is not installed (also an ImportError)
    ├── ExtensionError         a plugin, recipe or rule package that does not load
    └── NotInForce             the run's precision is not what the policy declares
    MpguardWarning (a UserWarning)
    ├── NotCarried             a target has no setting for a field of the policy
    ├── NoEffectWarning        a field of delayed scaling with another FP8 recipe, which ignores it
    └── NotProven              a run ended before its precision could be observed (enforce="warn")

The form of every message: where: what is; what is needed; what to do.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

#: In a folder with more names than this, a similar one takes too long to find.
_MOST_NAMES = 5000


class MpguardError(Exception):
    """Base class of all errors that mpguard raises on purpose; the message is for the user."""


class PolicyError(MpguardError, ValueError):
    """Precision settings that contradict each other; the message gives the reason."""


class UnknownRecipe(PolicyError):
    """No recipe has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(f"there is no recipe `{name}`{did_you_mean(name, self.known)}")


class NoEffect(PolicyError):
    """A field has a value that changes nothing with the other fields of the policy. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


class ConfigError(MpguardError):
    """A config file that cannot be used as it is."""


class SettingsError(ConfigError):
    """`[tool.mpguard]` or `mpguard.toml` has an unknown key, or a value of the wrong kind."""


class MissingExtra(MpguardError, ImportError):
    """The library of a target is not installed. `name` is the library, as in any ImportError."""

    def __init__(self, library: str, extra: str, wanted_for: str) -> None:
        text = f"{wanted_for} needs `{library}`, which is not installed: pip install 'mpguard[{extra}]'"
        super().__init__(text, name=library)
        self.extra = extra


class ExtensionError(MpguardError):
    """A plugin, recipe or rule module that fails to import or to register."""


class NotInForce(MpguardError, RuntimeError):
    """The precision of a run is not, or would not be, what the policy declares. Exit status 1.

    Attributes: `verdict`, "not in force", or "not proven" if the precision could not be observed; `reasons`, the
    message without how to continue in spite of it; `failures`, what is wrong or not proven, as plain data.
    """

    def __init__(
        self,
        message: str,
        *,
        verdict: str = "not in force",
        override: str = "",
        failures: Iterable[Mapping[str, object]] = (),
    ) -> None:
        self.verdict, self.reasons, self.failures = verdict, message, tuple(failures)
        super().__init__(f"{message}{override}")


class MpguardWarning(UserWarning):
    """Base class of all warnings of mpguard."""


class NotCarried(MpguardWarning):
    """A target has no setting for required fields of the policy.

    Attributes: `fields`, the values of all of them by name; `field` and `value`, the first; `target`; and `carriers`,
    the targets that carry all of them.
    """

    def __init__(
        self, field: str, value: object, target: str, carriers: Iterable[str], more: Mapping[str, object] | None = None
    ) -> None:
        self.field, self.value, self.target = field, value, target
        self.fields = {field: value, **(more or {})}
        self.carriers = tuple(carriers)
        none = "no target supports " + ("all of them" if more else "it")
        by = f"supported by {', '.join(self.carriers)}" if self.carriers else none
        named = ", ".join(f"`{name}={own}`" for name, own in self.fields.items())
        super().__init__(f"{target}: has no setting for {named} of the policy; {by}")


class NoEffectWarning(MpguardWarning):
    """A field of delayed scaling is set with another FP8 recipe, which ignores it. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


class NotProven(MpguardWarning):
    """The run ended before its precision could be observed."""


def near(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names most similar to `name`, best first, then those that begin with it; empty if none is."""
    known = list(known)
    found = difflib.get_close_matches(name, known, n=most, cutoff=0.6)
    if not found:
        lowered = {k.lower().replace("-", "_"): k for k in known}
        matches = difflib.get_close_matches(name.lower().replace("-", "_"), lowered, n=most, cutoff=0.5)
        found = [lowered[match] for match in matches]
    begun = sorted((k for k in known if name and k.startswith(tuple(f"{name}{mark}" for mark in "_-."))), key=len)
    return list(dict.fromkeys([*found, *begun]))[:most]


def did_you_mean_file(path: str) -> str:
    """Return a clause for the end of an error about a missing file: the similar names in its folder."""
    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or ".")  # noqa: PTH208
    except OSError:
        return ""
    if len(names) > _MOST_NAMES:
        return ""
    # The cutoff is high because equal suffixes make all names a little similar.
    nearest = [
        str(Path(folder, each)) for each in difflib.get_close_matches(name, names, cutoff=0.75) if each != name
    ]  # a link that leads nowhere has the name itself
    return f"; did you mean {' or '.join(f'`{each}`' for each in nearest)}?" if nearest else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause for the end of an error: the similar names, or all names if none is similar."""
    known = sorted(known)
    nearest = near(name, known)
    if nearest:
        return f"; did you mean {' or '.join(f'`{n}`' for n in nearest)}?"
    return f"; known are {', '.join(known)}" if known else ""
