"""What lies around a file: the launch configs of its code, and the modules that it imports."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mpguard.core import settings, tracked_fs
from mpguard.core.errors import ConfigError
from mpguard.lint.project import launch_configs, launch_lines, reverse_imports, tree
from mpguard.lint.project.launch_configs import LaunchConfig
from mpguard.lint.project.launch_lines import Launch
from mpguard.lint.project.requirements import Required, required
from mpguard.lint.project.siblings import LARGEST_CONFIG
from mpguard.lint.source.files import MARKDOWN, NOTEBOOK, matches

if TYPE_CHECKING:
    from mpguard.document import Document
    from mpguard.lint.facts.file import Facts

#: Modules, and bytes of them, that are read on behalf of one linted file. Counted per file and not
#: per run: what is found in a file does not depend on what else was linted.
MOST_MODULES = 40
MOST_BYTES = 2 << 20
#: Bytes of modules whose trees are kept for the next files; many thousands of files would need gigabytes.
MOST_KEPT = 8 << 20


class Project:
    """What rules may ask about the surroundings of a file. One per process; files one after another.

    given: the configs of `--config`; they replace those of the settings and those beside the code.
    """

    def __init__(self, given: Iterable[LaunchConfig] = (), gpu: str | None = None) -> None:
        self._given = tuple(given)
        self._gpu = gpu
        self._configured = tracked_fs.TrackedCache(launch_configs.configured)
        self._beside = tracked_fs.TrackedCache(launch_configs.beside)
        self._launched = tracked_fs.TrackedCache(launch_configs.launched)
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
        with tracked_fs.recording_for(path):
            return self._gpu or settings.nearest(Path(path)).gpu

    def required(self, path: str, package: str) -> Required:
        """The versions of a package that the project of a file asks for."""
        folder = Path(path).absolute().parent
        with tracked_fs.recording_for(path):
            return required(str(folder), str(tree.top_of(folder)), package)

    def declared(self, path: str) -> Literal["training", "inference"] | None:
        """What `training-paths` and `inference-paths` say about a file."""
        with tracked_fs.recording_for(path):
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
        with tracked_fs.recording_for(path):
            configured = self._configured(folder)
            if configured or path.endswith((NOTEBOOK, *MARKDOWN)):
                return configured
            named = self._launched(path)
            if named is not None:
                return named
            found = self._beside(folder)
            return () if found and launch_configs.for_others(path, found) else found

    def named_in(self, name: str, path: str) -> Path | None:
        """The file that a command in a file names, if it lies in the tree."""
        with tracked_fs.recording_for(path):
            return launch_lines.located(name, path, tree.top_of(Path(path).absolute().parent))

    def launched_with(self, config: str, option: str = "config_file") -> tuple[tuple[str, Launch], ...]:
        """The launch lines of the tree that name an accelerate config, each with the script that it starts; or by
        another option, another file."""
        with tracked_fs.recording_for(config):
            return tuple(launch_configs.launched_with(config, option))

    def config_named(self, path: str, name: str) -> Document | None:
        """The config that a file names (`config="ds_config.json"`), beside it or in the working directory."""
        from mpguard import document

        with tracked_fs.recording_for(path):
            for candidate in (Path(path).parent / name, Path(name)):
                try:
                    if tracked_fs.is_file(candidate) and (tracked_fs.size(candidate) or 0) <= LARGEST_CONFIG:
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
        with tracked_fs.recording_for(from_path):
            path = tree.file_of(module, from_path)
        if path is None:
            return None
        tracked_fs.add_dependency(from_path, path)
        key = os.path.realpath(path)
        if key in self._broken:
            return None
        if key not in self._counted and path not in self._counted:
            with tracked_fs.recording_for(path):
                size = tracked_fs.size(path) or 0
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
        with tracked_fs.recording_for(path):
            return reverse_imports.may_take(tree.top_of(file.parent), file, name)

    def _read(self, path: str) -> Facts | None:
        from mpguard.lint.facts.file import Facts
        from mpguard.lint.source.source import Source
        from mpguard.lint.source.text import Unparsable

        try:
            with tracked_fs.recording_for(path):
                data = tracked_fs.read(path)
            return Facts(Source.parse(data, path, check_syntax=False), self, imported=True)
        except (OSError, Unparsable, RecursionError):
            return None
