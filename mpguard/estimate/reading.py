"""Read the sizes of a model from its config.json. Only json is read: no code of the model is imported."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mpguard.core.errors import ConfigError, did_you_mean, did_you_mean_file, near

#: Sizes of published models, by name, as their config.json has them.
BUILT_IN = Path(__file__).with_name("models.json")

#: Values of the parts of models with images, by `model_type`, as their classes in transformers have them.
DEFAULTS = Path(__file__).with_name("defaults.json")

#: The largest number of blocks, and the largest size of another kind.
MOST_BLOCKS, MOST = 2000, 2**40

_ABSENT = object()


class ModelConfig:
    """The values of a config.json. Every error names the file and the key."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self.path = values, path

    @property
    def architecture(self) -> str:
        """The name of the model family."""
        name = self.values.get("model_type")
        if not isinstance(name, str):
            raise ConfigError(
                f"{self.path}: there is no `model_type`, which names the architecture; a config.json of "
                "transformers is needed"
            )
        return name

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a positive number. names: the key, and older names of it."""
        value = self._value(names)
        if value is _ABSENT or value is None:
            if default is not None:
                return default
            raise ConfigError(
                f"{self.path}: `{names[0]}` is missing; an estimate for {self.architecture} needs it. Add it, or "
                "pass the model's own config.json"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{self.path}: `{names[0]}` is {value!r:.40}; a whole number above 0 is needed")
        if value > MOST:
            raise ConfigError(f"{self.path}: `{names[0]}` is {value}; {MOST:,} is the most that is estimated")
        return value

    def blocks(self, *names: str) -> int:
        """Return the number of repeated blocks. Each is run on its own, so there is a limit."""
        number = self.size(*names)
        if number > MOST_BLOCKS:
            raise ConfigError(f"{self.path}: `{names[0]}` is {number}; {MOST_BLOCKS:,} is the most that is estimated")
        return number

    def count(self, *names: str, default: int = 0) -> int:
        """Return a number that may be 0."""
        return 0 if self._value(names) == 0 else self.size(*names, default=default) if self.has(*names) else default

    def share(self, *names: str, default: float = 0.0) -> float:
        """Return a number, such as a dropout probability."""
        value = self._value(names)
        if value is _ABSENT or value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{self.path}: `{names[0]}` is {value!r:.40}; a number is needed")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return True or False."""
        value = self._value((name,))
        if value is _ABSENT or value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path}: `{name}` is {value!r:.40}; true or false is needed")
        return value

    def word(self, *names: str, default: str) -> str:
        """Return text."""
        value = self._value(names)
        if value is _ABSENT or value is None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f"{self.path}: `{names[0]}` is {value!r:.40}; text is needed")
        return value

    def numbers(self, name: str) -> list[int]:
        """Return a list of whole numbers; empty without the key."""
        value = self._value((name,))
        if value is _ABSENT or value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise ConfigError(f"{self.path}: `{name}` is {value!r:.40}; a list of whole numbers is needed")
        return value

    def has(self, *names: str) -> bool:
        """True if one of the keys has a value."""
        return self._value(names) not in (_ABSENT, None)

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a section; empty without it."""
        value = self.values.get(name)
        return value if isinstance(value, Mapping) else {}

    def section(self, name: str, kind: str, *, flat: bool = False) -> ModelConfig:
        """Return a part that is a config of its own, with the defaults of its class: files leave these out.

        kind: its `model_type` if it names none. flat: older files have its keys next to `name`.
        """
        own = self.part(name)
        if not own and flat:
            own = {key: value for key, value in self.values.items() if key != "model_type"}
        named = own.get("model_type")
        kind = named.removesuffix("_vision") if isinstance(named, str) else kind
        shared = {key: self.values[key] for key in ("tie_word_embeddings",) if key in self.values and flat}
        return ModelConfig({**defaults().get(kind, {}), **own, **shared, "model_type": kind}, f"{self.path} ({name})")

    def _value(self, names: tuple[str, ...]) -> Any:
        return next((self.values[name] for name in names if name in self.values), _ABSENT)


@cache
def defaults() -> dict[str, dict[str, Any]]:
    """Return what transformers' classes have for keys that a file leaves out, of parts of a model, by `model_type`."""
    found: dict[str, dict[str, Any]] = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return found


@cache
def built_in() -> dict[str, dict[str, Any]]:
    """Return the configs of the models that need no file."""
    found: dict[str, dict[str, Any]] = json.loads(BUILT_IN.read_text(encoding="utf-8"))
    return found


def read_model(name: str) -> ModelConfig:
    """Return the config of a file, a folder with one, a built-in name, or the id of a downloaded model.

    Raises `ConfigError`.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(
                f"{name}: this folder has no config.json; a folder with one, or the file itself, is needed"
            )
    if not path.is_file():
        found = built_in().get(name.rpartition("/")[2].lower())
        if found is not None:
            return ModelConfig(found, name)
        if path.suffix == ".json" or (path.parent.is_dir() and path.parent != Path()):  # no name of a model
            raise ConfigError(f"{name}: there is no such file{did_you_mean_file(name)}")
        downloaded = _downloaded(name)
        if downloaded is not None:
            return ModelConfig(_object(downloaded), name)
        hint = did_you_mean(name, built_in()) if near(name, built_in()) else ""
        raise ConfigError(
            f"there is no built-in model `{name}`{hint or '.'} `mpguard estimate --list` prints them. The cache of "
            "huggingface_hub has no config.json of this name: pass the path of one. Diffusion models, and others "
            "that are none of transformers, are not estimated"
        )
    return ModelConfig(_object(path), str(path))


def _downloaded(name: str) -> Path | None:
    """Return the config.json of a model id in the cache of huggingface_hub. Nothing is downloaded."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except ValueError:  # not an id
        return None
    return Path(found) if isinstance(found, str) else None


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if path.suffix != ".json":
            raise ConfigError(
                f"{path}: is no config.json. Pass the name of a model (`mpguard estimate --list`), a config.json of "
                'transformers or its folder; for a GPT of your own a file with {"model_type": "gpt2", "n_layer": ..., '
                '"n_embd": ..., "n_head": ..., "n_positions": ..., "vocab_size": ...}'
            ) from None
        raise ConfigError(f"{path}: is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: has no JSON object; a config.json of transformers is needed")
    return values
