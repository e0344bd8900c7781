"""The editor's settings for mpguard: options of `mpguard lint` in camel case, as editors spell settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpguard.core.errors import ConfigError, SettingsError, did_you_mean
from mpguard.core.settings import codes, string, strings, truth
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Options

#: The section of the editor's settings that mpguard reads.
SECTION = "mpguard"


@dataclasses.dataclass(frozen=True)
class ClientSettings:
    """Settings of an editor for one workspace folder. Like the command line, they override `[tool.mpguard]`.

    configs: launch configs, relative to the folder.
    """

    select: tuple[str, ...] | None = None
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    preview: bool = False
    configs: tuple[str, ...] = ()
    gpu: str | None = None
    include_markdown: bool = False

    def options(self, folder: Path) -> Options:
        """Return the options for the engine. Raises `ConfigError`."""
        from mpguard.lint.project.launch_configs import launch_config

        if self.gpu is not None:
            from mpguard.policy.hardware import named

            named(self.gpu)
        for name in self.configs:
            if not (folder / name).is_file():
                raise ConfigError(f"the editor's setting mpguard.configs: {folder / name}: no such file")
        selectors = Selectors(self.select, self.extend_select, self.ignore, self.preview)
        configs = tuple(launch_config(folder / name) for name in self.configs)
        return Options(selectors, configs, self.gpu)


def read(given: object) -> ClientSettings:
    """Return the settings that an editor sends: the section itself, or an object with it. Raises `SettingsError`."""
    if isinstance(given, Mapping) and SECTION in given:
        given = given[SECTION]
    if given is None:
        return ClientSettings()
    if not isinstance(given, Mapping):
        raise SettingsError(f"the editor's setting mpguard is {given!r}; an object is needed")
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _KEYS:
            raise SettingsError(f"the editor's settings: there is no setting `mpguard.{key}`{did_you_mean(key, _KEYS)}")
        name, convert, needed = _KEYS[key]
        if value is None:
            continue
        try:
            values[name] = convert(value)
        except ValueError:
            raise SettingsError(f"the editor's setting mpguard.{key} is {value!r}; {needed} is needed") from None
    return ClientSettings(**values)


_KEYS: Mapping[str, tuple[str, Callable[[Any], Any], str]] = {
    "select": ("select", codes, "a list of codes"),
    "extendSelect": ("extend_select", codes, "a list of codes"),
    "ignore": ("ignore", codes, "a list of codes"),
    "preview": ("preview", truth, "true or false"),
    "configs": ("configs", strings, "a list of files"),
    "gpu": ("gpu", string, "a name (h100) or a capability (sm_90)"),
    "includeMarkdown": ("include_markdown", truth, "true or false"),
}
