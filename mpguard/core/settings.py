"""`[tool.mpguard]` in the nearest `pyproject.toml` above a file, or the same keys in an `mpguard.toml`.

An unknown key or a value of the wrong type raises `SettingsError`: otherwise a misspelled setting would silently have
no effect.
"""

# Hundreds of folders are searched here, and strings are several times faster than Path.
# ruff: noqa: PTH100, PTH118, PTH120

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpguard.core import tracked_fs
from mpguard.core.errors import SettingsError, did_you_mean
from mpguard.core.tracked_fs import cached_per_run

ENFORCE = ("error", "warn", "off")


@dataclasses.dataclass(frozen=True)
class ToolSettings:
    """The settings of the files below `root`. Patterns have the syntax of .gitignore and are relative to `root`.

    source: the file that sets them; None if there is none, and every setting has its default.
    select: codes, prefixes of codes or ALL instead of the rules that are on by default; None: the default rules.
    preview: prefixes and ALL select preview rules too.
    per_file_ignores: pattern -> codes that are ignored in the matching files; `!pattern`: in all other files.
    configs: launch configs that the code is checked against, instead of those in the same folder.
    recipe, enforce: defaults of `mpguard.run` and `mpguard.auto`.
    gpu: the GPU that the code will run on (`h100`, `sm_90`).
    training_paths, inference_paths: files whose code trains, or does not, where the code itself does not show it.
    cache_dir: the folder in which findings are cached, instead of `.mpguard_cache`.
    """

    root: Path
    source: Path | None = None
    select: tuple[str, ...] | None = None
    extend_select: tuple[str, ...] = ()
    preview: bool = False
    ignore: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    recipe: str | None = None
    gpu: str | None = None
    training_paths: tuple[str, ...] = ()
    inference_paths: tuple[str, ...] = ()
    enforce: str | None = None
    cache_dir: str | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest that is equal for equal settings."""
        return tracked_fs.digest(repr(self).encode())

    def config_paths(self) -> tuple[Path, ...]:
        """Return `configs` as paths. Raises `SettingsError` for a path that is not a file."""
        paths = tuple(self.root / name for name in self.configs)
        for path in paths:
            if tracked_fs.type_of(str(path)) != "file":
                raise SettingsError(f"{self.source}: `configs` names `{path}`, which is not a file")
        return paths


_ISOLATED: ContextVar[bool] = ContextVar("isolated", default=False)


@contextlib.contextmanager
def isolated(on: bool = True) -> Iterator[None]:
    """Read no settings from files within this context (`--isolated`)."""
    token = _ISOLATED.set(on)
    try:
        yield
    finally:
        _ISOLATED.reset(token)


def are_isolated() -> bool:
    """True if settings in files, and extensions of other distributions, are to be ignored."""
    return _ISOLATED.get()


def nearest(path: Path) -> ToolSettings:
    """Return the settings for a file or a folder: those of the nearest folder, itself or above, that has any.

    A `pyproject.toml` without `[tool.mpguard]` is skipped. Raises `SettingsError`.
    """
    absolute = str(path.absolute())
    return of_folder(absolute if tracked_fs.type_of(absolute) == "folder" else os.path.dirname(absolute))


def of_file(path: str) -> ToolSettings:
    """Return the settings for an existing file: many files of one folder cost little more than one."""
    return of_folder(os.path.dirname(os.path.abspath(path)))


def of_folder(folder: str) -> ToolSettings:
    """Return the settings for an existing folder, by its absolute path; each folder is read once per run."""
    if are_isolated():
        return ToolSettings(Path(Path(folder).anchor))
    with tracked_fs.untracked():
        found = _of_folder(folder)
    tracked_fs.record("settings", folder, found.fingerprint)
    return found


@cached_per_run
def _of_folder(folder: str) -> ToolSettings:
    for name in ("mpguard.toml", "pyproject.toml"):
        settings = _read(os.path.join(folder, name))
        if settings is not None:
            return settings
    parent = os.path.dirname(folder)
    return ToolSettings(Path(folder)) if folder == parent else _of_folder(parent)


def _read(name: str) -> ToolSettings | None:
    """Return the settings in one file; None if the file does not exist or has no table for mpguard."""
    try:
        text = tracked_fs.read_regular_file(name).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name}: cannot be read: {error}") from None
    path = Path(name)
    own = path.name == "mpguard.toml"
    if not own and "mpguard" not in text:
        return None
    if TYPE_CHECKING or sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: Any = tomllib.loads(text)
    except RecursionError:
        raise SettingsError(f"{path}: is nested too deeply to be read") from None
    except ValueError as error:  # TOMLDecodeError, or a number with more digits than Python converts
        raise SettingsError(f"{path}: is not TOML: {error}") from None
    if not own:
        tools = table.get("tool")
        table = tools.get("mpguard") if isinstance(tools, dict) else None
        if table is None:
            return None
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: `tool.mpguard` is {_shown(table)}; a table is needed")
    return ToolSettings(path.parent, path, **_values(table, path, text))


def _values(table: Mapping[str, Any], path: Path, text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}{_line(text, key)}"
        if key not in _KEYS:
            inner = value if key in ("tool", "mpguard") and isinstance(value, dict) else None
            hint = (
                did_you_mean(key, _KEYS)
                if inner is None
                else "; in this file the settings are at the top level, in no table"
            )
            raise SettingsError(f"{where}: there is no setting `{key}`{hint}")
        read, needed = _KEYS[key]
        try:
            values[key.replace("-", "_")] = read(value)
        except ValueError:
            raise SettingsError(f"{where}: `{key}` is {_shown(value)}; {needed} is needed") from None
    return values


def _line(text: str, key: str) -> str:
    """Return `:LINE` of a key, for messages; empty if the key is not found once (tomllib keeps no positions)."""
    lines = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if re.match(rf"""\s*(["']?){re.escape(key)}\1\s*=|\s*\[(tool\.mpguard\.)?{re.escape(key)}\]""", line)
    ]
    return f":{lines[0]}" if len(lines) == 1 else ""


def _shown(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)


def string(value: Any) -> str:
    """Return the value of a setting, from a file or an editor, if it is a string; else raise `ValueError`."""
    if not isinstance(value, str):
        raise ValueError
    return value


def strings(value: Any) -> tuple[str, ...]:
    """Return the items of a list of strings; raise `ValueError` for any other value."""
    if not isinstance(value, list):
        raise ValueError
    return tuple(map(string, value))


def truth(value: Any) -> bool:
    """Return a value if it is a boolean; else raise `ValueError`."""
    if not isinstance(value, bool):
        raise ValueError
    return value


def codes(value: Any) -> tuple[str, ...]:
    """Return rule codes in upper case, as on the command line."""
    return tuple(code.upper() for code in strings(value))


def _patterns(value: Any) -> tuple[str, ...]:
    return tuple(map(_pattern, strings(value)))


def _pattern(text: str) -> str:
    """Return a pattern in .gitignore syntax, where `./src` would match nothing. Raises `ValueError` if it is empty."""
    negated, rest = ("!", text[1:]) if text.startswith("!") else ("", text)
    if not rest.strip():
        raise ValueError
    return negated + (rest[1:] if rest.startswith("./") else rest)


def _ignores(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise ValueError
    return {_pattern(pattern): codes(ignored) for pattern, ignored in value.items()}


def _enforce(value: Any) -> str:
    if value not in ENFORCE:
        raise ValueError
    return string(value)


_A_LIST, _PATTERNS = "a list of strings", "a list of patterns, none of them empty,"
_KEYS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "select": (codes, _A_LIST),
    "extend-select": (codes, _A_LIST),
    "ignore": (codes, _A_LIST),
    "preview": (truth, "true or false"),
    "per-file-ignores": (_ignores, "a table of pattern = list of codes"),
    "include": (_patterns, _PATTERNS),
    "exclude": (_patterns, _PATTERNS),
    "configs": (strings, _A_LIST),
    "recipe": (string, "a string"),
    "gpu": (string, "a string"),
    "training-paths": (_patterns, _PATTERNS),
    "inference-paths": (_patterns, _PATTERNS),
    "enforce": (_enforce, "one of error, warn, off"),
    "cache-dir": (string, "a string"),
}
