"""The configs that code is launched with: their precision, and which ones belong to a script."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mpguard.core import settings, tracked_fs
from mpguard.core.errors import ConfigError
from mpguard.lint.project import launch_lines
from mpguard.lint.project.launch_lines import Launch, Word
from mpguard.lint.project.siblings import LARGEST_CONFIG, deepspeed_precision, mentions
from mpguard.lint.project.tree import top_of
from mpguard.lint.source.files import CONFIG
from mpguard.lint.source.strip_comments import stripped

if TYPE_CHECKING:
    from mpguard.document import Document, Entry

#: The names that a script which is started with an accelerate config uses.
_LAUNCHED = r"\b(?:accelerate|deepspeed|transformers|trl|mpguard)\b|Trainer\b"


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """A config that code is launched with: one of accelerate, or a DeepSpeed file.

    mixed_precision: its precision, in lower case, as accelerate 1.15 resolves it:
        `deepspeed_config.mixed_precision` takes precedence over the top level (S7); without both,
        the precision that the DeepSpeed file it names enables. None if it sets none, or it is unknown.
    distributed_type: as it is written; `DEEPSPEED` for a DeepSpeed file.
    fp8_backend: that of the launch line, which overrides the config's, in upper case; "" if it is unknown.
    """

    path: str
    document: Document
    mixed_precision: str | None
    distributed_type: str | None
    fp8_backend: str | None = None
    #: The file and the word of the launch line that sets `mixed_precision` instead.
    place: tuple[str, Word] | None = None

    def entry(self, key: str) -> Entry | None:
        """Return the entry at a dotted path, with its place in the document."""
        return self.document.entry(key)


def launch_config(path: Path, shown: str | None = None) -> LaunchConfig:
    """Read a config that code is launched with. Raises `ConfigError` for any other file."""
    from mpguard import document  # imports PyYAML, which most runs over Python do not need

    read = document.read(path)
    data = read.require()
    shown = shown or str(path)
    if read.kind == "deepspeed":
        return of_deepspeed(read, shown)
    if read.kind != "accelerate":
        kind = f"a config of {read.kind}" if read.kind else "neither"
        raise ConfigError(f"{path}: code is checked against configs of accelerate or DeepSpeed; this is {kind}")
    distributed = data.get("distributed_type")
    return LaunchConfig(
        shown, read, _accelerate_precision(data, path), distributed if isinstance(distributed, str) else None
    )


def of_deepspeed(read: Document, shown: str | None = None) -> LaunchConfig:
    """Return a DeepSpeed file that was read as a launch config."""
    return LaunchConfig(shown or read.path, read, deepspeed_precision(read.require()), "DEEPSPEED")


def _accelerate_precision(data: dict[str, object], path: Path) -> str | None:
    section = data.get("deepspeed_config")
    section = section if isinstance(section, dict) else {}
    for value in (
        section.get("mixed_precision"),
        data.get("mixed_precision"),
        "fp16" if data.get("fp16") is True else None,
    ):
        if value is not None:
            return value.lower() if isinstance(value, str) else None
    from mpguard.document import read

    name = section.get("deepspeed_config_file")
    if not isinstance(name, str):
        return None
    for candidate in (Path(name), path.parent / name):
        try:
            return deepspeed_precision(read(candidate).require())
        except ConfigError:
            continue
    return None


def launched_with(config: str, option: str = "config_file") -> Iterator[tuple[str, Launch]]:
    """Yield the launch lines of the tree that name an accelerate config, each with the script that it starts.

    option: another option, which names another kind of file.
    """
    top = top_of(Path(config).absolute().parent)
    for script, launches in launch_lines.in_tree(top).items():
        for launch in launches:
            own = launch.launcher == "mpguard" and option == "config_file"
            named = launch.options.get("config" if own else option)
            name = named.resolved if named is not None else None
            file = launch_lines.located(name, launch.path, top) if name else None
            if file is not None and tracked_fs.real_path(file) == tracked_fs.real_path(config):
                yield script, launch


def configured(folder: Path) -> tuple[LaunchConfig, ...]:
    """Return the configs that the settings of a folder name."""
    return tuple(launch_config(path, os.path.relpath(path)) for path in settings.nearest(folder).config_paths())


def launched(path: str) -> tuple[LaunchConfig, ...] | None:
    """Return the configs that the launch lines of the tree name for a script; none if one of them is unknown.

    None if no line names one: a line without a config uses that of the user's cache, which is not in the tree.
    """
    top = top_of(Path(path).absolute().parent)
    found: list[LaunchConfig] = []
    for launch in launch_lines.in_tree(top).get(tracked_fs.real_path(path), ()):
        named, precision = _named(launch), launch.options.get("mixed_precision")
        if named is None and precision is None:
            continue
        config = _flags_only(launch) if named is None else _found(named, launch, top)
        if config is None or (precision is not None and precision.text is None):
            return ()
        if precision is not None and precision.text is not None:
            where = (os.path.relpath(launch.path), precision)
            config = dataclasses.replace(config, mixed_precision=precision.text.lower(), place=where)
        backend = launch.options.get("fp8_backend")
        if backend is not None:
            config = dataclasses.replace(config, fp8_backend=(backend.text or "").upper())
        if config not in found:
            found.append(config)
    return tuple(found) or None


def _found(named: Word, launch: Launch, top: Path) -> LaunchConfig | None:
    try:
        name = named.resolved
        file = launch_lines.located(name, launch.path, top) if name else None
        return None if file is None else launch_config(file, os.path.relpath(file))
    except ConfigError:
        return None


def _flags_only(launch: Launch) -> LaunchConfig:
    """Return the config of a launch line that has no config file, and sets the precision itself."""
    from mpguard.document import parse

    return LaunchConfig(os.path.relpath(launch.path), parse("{}", launch.path, "yaml"), None, None)


def _named(launch: Launch) -> Word | None:
    """Return the config that a launch line names; an unknown word where it may name one, or names two."""
    own = launch.options.get("config" if launch.launcher == "mpguard" else "config_file")
    deepspeed = launch.argument("--deepspeed", "--deepspeed_config")
    if deepspeed is not None and (deepspeed[1].text or ".json").endswith(".json"):
        return deepspeed[1] if own is None else Word(None, own.span)
    if own is None and launch.hidden and launch.launcher in ("accelerate", "mpguard"):
        return Word(None, launch.span)
    return own


def in_folder(folder: Path) -> tuple[LaunchConfig, ...]:
    """Return the accelerate configs in a folder."""
    found = []
    for path in (folder / name for name in tracked_fs.list_names(folder, CONFIG)):
        if not tracked_fs.is_file(path):
            continue
        try:
            if b"distributed_type" not in (tracked_fs.read_up_to(path, LARGEST_CONFIG) or b""):
                continue
            config = launch_config(path, os.path.normpath(path))
        except (OSError, ConfigError):
            continue  # not a launch config; if it is a broken one, the check of that file reports it
        if config.document.kind == "accelerate":
            found.append(config)
    return tuple(found)


def for_others(path: str, configs: tuple[LaunchConfig, ...]) -> bool:
    """True if other code next to the configs uses accelerate, and this file does not."""
    try:
        return not re.search(_LAUNCHED.encode(), stripped(tracked_fs.read(path))) and any(
            mentions(config.path, r"\baccelerate\b") for config in configs
        )
    except OSError:
        return False
