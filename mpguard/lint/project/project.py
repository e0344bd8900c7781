"""What lies around a file: the launch configs of its code, and the modules that it imports."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mpguard import looks, settings
from mpguard.errors import ConfigError
from mpguard.lint.files import CONFIG, MARKDOWN, NEVER, NOTEBOOK, matches
from mpguard.lint.noise import stripped
from mpguard.lint.project import importers, launch_lines
from mpguard.lint.project.launch_lines import Launch, Word
from mpguard.lint.project.requirements import Required, required
from mpguard.remembered import remembered

if TYPE_CHECKING:
    from mpguard.document import Document, Entry
    from mpguard.lint.facts.file import Facts

#: Modules, and bytes of them, that are read on behalf of one linted file. Counted per file and not
#: per run: what is found in a file does not depend on what else was linted.
MOST_MODULES = 40
MOST_BYTES = 2 << 20
#: Bytes of modules whose trees are kept for the next files; many thousands of files would need gigabytes.
MOST_KEPT = 8 << 20
#: What a script that is started with an accelerate config uses.
_LAUNCHED = r"\b(?:accelerate|deepspeed|transformers|trl|mpguard)\b|Trainer\b"
#: A launch config is some hundred bytes; files beside the code that are larger are data.
LARGEST_CONFIG = 64 << 10


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """A config that code is launched with: one of accelerate, or a DeepSpeed file.

    mixed_precision: what it asks for, in lower case, as accelerate 1.15 resolves it:
        `deepspeed_config.mixed_precision` beats the top level (S7); where neither is there, what
        the DeepSpeed file that it names has enabled. None where it asks for nothing or it is unclear.
    distributed_type: as it is written; `DEEPSPEED` of a DeepSpeed file.
    """

    path: str
    document: Document
    mixed_precision: str | None
    distributed_type: str | None
    #: The word of a launch line that says `mixed_precision` instead, and the file that it stands in.
    said_at: tuple[str, Word] | None = None

    def entry(self, key: str) -> Entry | None:
        """The entry at a dotted path, with its place in the document."""
        return self.document.entry(key)


def launch_config(path: Path, shown: str | None = None) -> LaunchConfig:
    """Reads a config that code is launched with. Raises `ConfigError` for a file that is none."""
    from mpguard import document  # and PyYAML, which most runs over Python do not need

    read = document.read(path)
    data = read.require()
    shown = shown or str(path)
    if read.kind == "deepspeed":
        return LaunchConfig(shown, read, _deepspeed_precision(data), "DEEPSPEED")
    if read.kind != "accelerate":
        what = f"a config of {read.kind}" if read.kind else "none"
        raise ConfigError(f"{path}: code is checked against configs of accelerate or DeepSpeed; this is {what}")
    distributed = data.get("distributed_type")
    return LaunchConfig(
        shown, read, _accelerate_precision(data, path), distributed if isinstance(distributed, str) else None
    )


def _accelerate_precision(data: dict[str, object], path: Path) -> str | None:
    section = data.get("deepspeed_config")
    section = section if isinstance(section, dict) else {}
    for said in (
        section.get("mixed_precision"),
        data.get("mixed_precision"),
        "fp16" if data.get("fp16") is True else None,
    ):
        if said is not None:
            return said.lower() if isinstance(said, str) else None
    from mpguard.document import read

    name = section.get("deepspeed_config_file")
    if not isinstance(name, str):
        return None
    for candidate in (Path(name), path.parent / name):
        try:
            return _deepspeed_precision(read(candidate).require())
        except ConfigError:
            continue
    return None


def _deepspeed_precision(data: dict[str, object]) -> str | None:
    enabled = [
        name
        for name in ("bf16", "fp16")
        if isinstance(section := data.get(name), dict) and section.get("enabled") is True
    ]
    return enabled[0] if len(enabled) == 1 else None


class Project:
    """What rules may ask about the surroundings of a file. One per process; files one after another.

    given: the configs of `--config`; they replace those of the settings and those beside the code.
    """

    def __init__(self, given: Iterable[LaunchConfig] = (), gpu: str | None = None) -> None:
        self._given = tuple(given)
        self._gpu = gpu
        self._configured = looks.Memory(_configured)
        self._beside = looks.Memory(_beside)
        self._launched = looks.Memory(_launched)
        self._modules: dict[str, Facts | None] = {}
        self._budget_modules = MOST_MODULES
        self._budget_bytes = MOST_BYTES
        self._kept_bytes = 0
        self._counted: set[str] = set()
        self._exhausted = False
        self._broken: set[str] = set()

    def forget(self, path: str) -> None:
        """An imported module turned out not to parse: it is unknown from here on, and what was made of it."""
        self._broken.add(os.path.realpath(path))
        self._modules.clear()

    def begin(self, path: str) -> None:
        """The engine turns to another file."""
        # Those that were read on a spent budget may know less than they would with one of their own.
        if self._exhausted or self._kept_bytes > MOST_KEPT:
            self._modules.clear()
            self._kept_bytes = 0
        self._budget_modules, self._budget_bytes, self._exhausted = MOST_MODULES, MOST_BYTES, False
        self._counted = {path}

    def gpu(self, path: str) -> str | None:
        """What the code is said to run on (`--gpu`, `[tool.mpguard] gpu`), or None."""
        with looks.on_behalf(path):
            return self._gpu or settings.nearest(Path(path)).gpu

    def required(self, path: str, package: str) -> Required:
        """The versions of a package that the project of a file asks for."""
        folder = Path(path).absolute().parent
        with looks.on_behalf(path):
            return required(str(folder), str(top_of(folder)), package)

    def declared(self, path: str) -> Literal["training", "inference"] | None:
        """What `training-paths` and `inference-paths` say about a file."""
        with looks.on_behalf(path):
            found = settings.nearest(Path(path))
        if matches(found.training_paths, found.root, path):
            return "training"
        return "inference" if matches(found.inference_paths, found.root, path) else None

    def configs_for(self, path: str) -> tuple[LaunchConfig, ...]:
        """The configs that a file is launched with: of `--config`, else of the settings, else those that the launch
        lines of its tree name, else beside it.

        Beside it: accelerate configs in its own folder. A folder may hold several, and nothing says
        which one is used. A notebook is launched with none.
        """
        if self._given:
            return self._given
        folder = Path(path).parent
        with looks.on_behalf(path):
            configured = self._configured(folder)
            if configured or path.endswith((NOTEBOOK, *MARKDOWN)):
                return configured
            named = self._launched(path)
            if named is not None:
                return named
            found = self._beside(folder)
            return () if found and _for_others(path, found) else found

    def named_in(self, name: str, path: str) -> Path | None:
        """The file that a command in a file names, if it lies in the tree."""
        with looks.on_behalf(path):
            return launch_lines.located(name, path, top_of(Path(path).absolute().parent))

    def launched_with(self, config: str) -> tuple[tuple[str, Launch], ...]:
        """The launch lines of the tree that name an accelerate config, each with the script that it starts."""
        with looks.on_behalf(config):
            return tuple(_launched_with(config))

    def config_named(self, path: str, name: str) -> Document | None:
        """The config that a file names (`config="ds_config.json"`), beside it or in the working directory."""
        from mpguard import document

        with looks.on_behalf(path):
            for candidate in (Path(path).parent / name, Path(name)):
                try:
                    if looks.is_file(candidate) and (looks.size(candidate) or 0) <= LARGEST_CONFIG:
                        found = document.read(candidate)
                        found.require()
                        return found
                except (OSError, ValueError, ConfigError):
                    continue
        return None

    def source_of(self, module: str, from_path: str) -> Facts | None:
        """The facts of an imported module (`pkg.losses`, `.losses`), if it lies in the linted tree.

        The tree is the folder of the nearest pyproject.toml, mpguard.toml or .git above the importing
        file, so that a file gets the same findings alone and with its folder; without one, and in
        site-packages, the outermost package that the file is in, or its folder. None where the module
        is elsewhere, does not parse, or the budget of the linted file is spent.
        """
        with looks.on_behalf(from_path):
            path = _resolve(module, from_path)
        if path is None:
            return None
        looks.uses(from_path, path)
        key = os.path.realpath(path)
        if key in self._broken:
            return None
        if key not in self._counted and path not in self._counted:
            with looks.on_behalf(path):
                size = looks.size(path) or 0
            if self._budget_modules < 1 or size > self._budget_bytes:
                self._exhausted = True
                return None
            self._counted.add(key)
            self._budget_modules -= 1
            self._budget_bytes -= size
        if key not in self._modules:
            self._modules[key] = None  # while it is read: modules import each other
            self._modules[key] = self._read(path)
            if (found := self._modules[key]) is not None:
                self._kept_bytes += len(found.source.data)
        return self._modules[key]

    def imported_elsewhere(self, path: str, name: str) -> bool:
        """Whether another file of the tree may take a name from a module; so it is where the tree is too large.

        By the last name of the module alone (`from x.compat import autocast`): what it says no to, no
        import reaches. A package hands on what its `__init__` imports.
        """
        file = Path(path).absolute()
        with looks.on_behalf(path):
            return importers.may_take(top_of(file.parent), file, name)

    def _read(self, path: str) -> Facts | None:
        from mpguard.lint.facts.file import Facts
        from mpguard.lint.source import Source, Unparsable

        try:
            with looks.on_behalf(path):
                data = looks.read(path)
            return Facts(Source.parse(data, path, check_syntax=False), self, imported=True)
        except (OSError, Unparsable, RecursionError):
            return None


def _launched_with(config: str) -> Iterator[tuple[str, Launch]]:
    top = top_of(Path(config).absolute().parent)
    for script, launches in launch_lines.in_tree(top).items():
        for launch in launches:
            named = launch.options.get("config" if launch.launcher == "mpguard" else "config_file")
            name = named.text if named is not None else None
            file = launch_lines.located(name, launch.path, top) if name else None
            if file is not None and looks.real(file) == looks.real(config):
                yield script, launch


def _configured(folder: Path) -> tuple[LaunchConfig, ...]:
    return tuple(launch_config(path, os.path.relpath(path)) for path in settings.nearest(folder).config_paths())


def _launched(path: str) -> tuple[LaunchConfig, ...] | None:
    """The configs that the launch lines of the tree name for a script; none where one of them is unknown.

    None where no line names one: a line without a config takes the user's own, which is out of sight.
    """
    top = top_of(Path(path).absolute().parent)
    found: list[LaunchConfig] = []
    for launch in launch_lines.in_tree(top).get(looks.real(path), ()):
        named, said = _named(launch), launch.options.get("mixed_precision")
        if named is None and said is None:
            continue
        config = _flags_only(launch) if named is None else _found(named, launch, top)
        if config is None or (said is not None and said.text is None):
            return ()
        if said is not None and said.text is not None:
            where = (os.path.relpath(launch.path), said)
            config = dataclasses.replace(config, mixed_precision=said.text.lower(), said_at=where)
        if config not in found:
            found.append(config)
    return tuple(found) or None


def _found(named: Word, launch: Launch, top: Path) -> LaunchConfig | None:
    try:
        file = None if named.text is None else launch_lines.located(named.text, launch.path, top)
        return None if file is None else launch_config(file, os.path.relpath(file))
    except ConfigError:
        return None


def _flags_only(launch: Launch) -> LaunchConfig:
    """A launch without a config file, that says its precision itself."""
    from mpguard.document import parse

    return LaunchConfig(os.path.relpath(launch.path), parse("", launch.path, "yaml"), None, None)


def _named(launch: Launch) -> Word | None:
    """The config that a launch line names; unknown where it may name one, or two of them."""
    own = launch.options.get("config" if launch.launcher == "mpguard" else "config_file")
    deepspeed = launch.argument("--deepspeed", "--deepspeed_config")
    if deepspeed is not None and (deepspeed[1].text or ".json").endswith(".json"):
        return deepspeed[1] if own is None else Word(None, own.span)
    if own is None and launch.hidden and launch.launcher in ("accelerate", "mpguard"):
        return Word(None, launch.span)
    return own


def _beside(folder: Path) -> tuple[LaunchConfig, ...]:
    found = []
    for path in (folder / name for name in looks.names(folder, CONFIG)):
        if not looks.is_file(path):
            continue
        try:
            if b"distributed_type" not in (looks.read_up_to(path, LARGEST_CONFIG) or b""):
                continue
            config = launch_config(path, os.path.normpath(path))
        except (OSError, ConfigError):
            continue  # no launch config; if it is a broken one, the run over it says so
        if config.document.kind == "accelerate":
            found.append(config)
    return tuple(found)


def _for_others(path: str, configs: tuple[LaunchConfig, ...]) -> bool:
    """Whether other code beside the configs uses what they configure, and this file does not."""
    from mpguard.lint.project.beside import mentions

    try:
        return not re.search(_LAUNCHED.encode(), stripped(looks.read(path))) and any(
            mentions(config.path, r"\baccelerate\b") for config in configs
        )
    except OSError:
        return False


def _resolve(module: str, from_path: str) -> str | None:
    """The file of a module, looked for from the importing file's folder up to the tree's top."""
    folder = Path(from_path).absolute().parent
    top = top_of(folder)
    dots = len(module) - len(module.lstrip("."))
    parts = [part for part in module[dots:].split(".") if part]
    if not all(part.isidentifier() for part in parts):
        return None
    above = [folder, *folder.parents]
    inside = above[: above.index(top) + 1]
    if dots:
        bases = inside[dots - 1 : dots]
    else:
        bases = [*inside, top / "src"]
        if parts and parts[0] == top.name and looks.is_file(top / "__init__.py"):
            bases.append(top.parent)
    for base in bases:
        module_file = base.joinpath(*parts)
        for candidate in (module_file.with_name(f"{module_file.name}.py"), module_file / "__init__.py"):
            if looks.is_file(candidate) and (parts or candidate.name == "__init__.py"):
                return str(candidate) if Path(from_path).is_absolute() else os.path.relpath(candidate)
    return None


@remembered
def top_of(folder: Path) -> Path:
    """The top of the tree that a folder is in: see `Project.source_of`."""
    for candidate in (folder, *folder.parents):
        if candidate.name in NEVER:
            break  # an installed package: what lies beside it is not of its tree
        if any(looks.exists(candidate / name) for name in ("pyproject.toml", "mpguard.toml", ".git")):
            return candidate
    top = folder
    while looks.is_file(top.parent / "__init__.py"):
        top = top.parent
    return top
