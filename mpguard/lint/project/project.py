"""The surroundings of a file: the launch configs of its code, and the modules that it imports."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mpguard.core import settings, tracked_fs
from mpguard.core.errors import ConfigError, MpguardError
from mpguard.lint.project import launch_configs, launch_lines, named_gpu, packages, siblings, summaries, tree
from mpguard.lint.project.api import ProjectApi
from mpguard.lint.project.launch_configs import LaunchConfig
from mpguard.lint.project.launch_lines import Launch
from mpguard.lint.project.questions import answered, ask, copies, uses
from mpguard.lint.project.questions import settings as settings_read
from mpguard.lint.project.questions.asked import Question
from mpguard.lint.project.requirements import Required, required
from mpguard.lint.project.siblings import LARGEST_CONFIG
from mpguard.lint.source.files import MARKDOWN, NOTEBOOK, PYTHON, matches
from mpguard.policy import recipes

if TYPE_CHECKING:
    from mpguard.document import Document
    from mpguard.lint.facts.file import Facts
    from mpguard.lint.source.incremental import Tree
    from mpguard.policy.policy import Policy

#: The most modules, and bytes of them, that are read for one linted file. Counted per file and not
#: per run, so that a file's findings do not depend on the other files of the run.
MOST_MODULES = 40
MOST_BYTES = 2 << 20
#: The most bytes of modules whose trees are kept for the next files; thousands of files would need gigabytes.
MOST_KEPT = 8 << 20
#: The most bytes of a file that is searched for calls of a function of another one.
LARGEST_USER = 256 << 10
#: The most other modules of a program whose text is searched.
MOST_NEARBY = 32


class _Questions(ProjectApi):
    """What a rule asks of the other files of the tree: each answer is searched for in their bytes, and recorded."""

    def _ask(self, path: str, question: Question, name: str = "", otherwise: bool = False, whole: bool = False) -> bool:
        file = Path(path).absolute()
        with tracked_fs.recording_for(path):
            top = tree.top_of(file.parent)
            known = tree.is_whole(top) if whole else tree.is_project(top)
            return ask(top, file, question, name) if known else otherwise

    def imported_elsewhere(self, path: str, name: str) -> bool:
        """True if another file of the tree may import a name from a module; see `summaries.may_import`."""
        file = Path(path).absolute()
        with tracked_fs.recording_for(path):
            return summaries.may_import(tree.top_of(file.parent), file, name)

    def derived_elsewhere(self, path: str, name: str) -> bool:
        file = Path(path).absolute()
        with tracked_fs.recording_for(path):
            return summaries.may_derive(tree.top_of(file.parent), file, name)

    def looked_up(self, path: str) -> bool:
        with tracked_fs.recording_for(path):
            return ask(tree.top_of(Path(path).absolute().parent), "", uses.may_look_up)

    def is_library(self, path: str) -> bool:
        folder = Path(path).absolute().parent
        with tracked_fs.recording_for(path):
            if not tracked_fs.is_file(folder / "__init__.py"):
                return False
            top, package = tree.top_of(folder), folder
            while package != top and tracked_fs.is_file(package.parent / "__init__.py"):
                package = package.parent
            return packages.is_installable(top) and (package == top or packages.builds_from(top, package.parent))

    def passes_option(self, path: str, name: str) -> bool:
        with tracked_fs.recording_for(path):
            return ask(tree.top_of(Path(path).absolute().parent), "", settings_read.passes_option, name)

    def unread_keys(self, path: str) -> list[tuple[str, str]]:
        file = Path(path).absolute()
        with tracked_fs.recording_for(path):
            top = tree.top_of(file.parent)
            found = answered(top, file, settings_read.unread_keys) if tree.is_project(top) else None
        pairs = [each.rpartition(":") for each in found] if isinstance(found, list) else []
        return [(config, key) for config, _, key in pairs]

    def is_copied_example(self, path: str) -> bool:
        """True if a file is an example of another project, of which its own contains a copy, and does not run it."""
        with tracked_fs.recording_for(path):
            return copies.is_copied_example(Path(path).absolute())

    def is_in_copy(self, path: str) -> bool:
        """True if a file is in a copy of another package, with another kind of license, below the top of a project."""
        file = Path(path).absolute()
        with tracked_fs.recording_for(path):
            top = tree.outermost(file.parent)
            return tree.is_project(top) and copies.is_in_copy(file, top, by_terms=True)

    def deepspeed_config_read_as_json(self, path: str) -> bool:
        """True if something in the project may read a DeepSpeed config by a stricter reader than DeepSpeed's."""
        return self._ask(path, settings_read.may_read_deepspeed_as_json, otherwise=True)

    def reads_deepspeed_key(self, path: str, key: str) -> bool:
        """True if code of the project of a DeepSpeed config reads a key of such configs itself."""
        return self._ask(path, settings_read.may_read_deepspeed_key, key)


class Project(_Questions):
    """The surroundings of a file, for rules. There is one per process, for one file after another.

    `ProjectApi` documents the methods that facts and rules call.

    given: the configs of `--config`; they replace those of the settings and those in the file's folder.
    """

    def __init__(self, given: Iterable[LaunchConfig] = (), gpu: str | None = None) -> None:
        self._given = tuple(given)
        self._gpu = gpu
        self._configured = tracked_fs.TrackedCache(launch_configs.configured)
        self._in_folder = tracked_fs.TrackedCache(launch_configs.in_folder)
        self._launched = tracked_fs.TrackedCache(launch_configs.launched)
        self._modules: dict[str, Facts | None] = {}
        self._budget_modules = MOST_MODULES
        self._budget_bytes = MOST_BYTES
        self._kept_bytes = 0
        self._counted: set[str] = set()
        self._exhausted = False
        self._broken: set[str] = set()
        #: The file that is being checked: modules that import it get its own facts, and are not kept for other files.
        self._linted: tuple[str, Facts] | None = None
        self._by_path: dict[str, Facts] = {}
        #: Module -> the modules whose facts its own refer to.
        self._used: dict[str, set[str]] = {}
        self._nearby: tuple[str, tuple[bytes, ...]] | None = None
        self._trees: dict[str, dict[str, list[Tree]]] = {}

    def forget(self, path: str) -> None:
        """Forget an imported module that does not parse, and the facts that depend on it."""
        self._broken.add(os.path.realpath(path))
        self._drop_facts()

    def _drop_facts(self) -> None:
        self._modules.clear()
        self._by_path.clear()
        self._used.clear()

    def _drop_users(self, keys: set[str]) -> None:
        """Drop the facts that refer to those of some modules, directly or through others."""
        found: set[str] = set()
        pending = keys
        while pending:
            pending = {user for user, used in self._used.items() if user not in found and used & pending}
            found |= pending
        for key in found:
            self._used.pop(key, None)
            facts = self._modules.pop(key, None)
            if facts is not None:
                self._by_path.pop(facts.path, None)

    def begin(self, path: str) -> None:
        """Begin another file."""
        # Facts that were computed after the budget was spent may lack what a full budget would give.
        if self._exhausted or self._kept_bytes > MOST_KEPT:
            self._drop_facts()
        else:
            # A file that is being checked is known in more detail than one that is imported.
            before = {self._linted[0]} if self._linted is not None else set()
            self._drop_users({*before, os.path.realpath(path)})
        if self._kept_bytes > MOST_KEPT:
            self._trees.clear()
            self._kept_bytes = 0
        self._linted, self._nearby = None, None
        self._budget_modules, self._budget_bytes, self._exhausted = MOST_MODULES, MOST_BYTES, False
        self._counted = {path}

    def add_linted(self, facts: Facts) -> None:
        self._linted = os.path.realpath(facts.path), facts

    def facts_at(self, path: str) -> Facts | None:
        if self._linted is not None and path == self._linted[1].path:
            return self._linted[1]
        return self._by_path.get(path)

    def gpu(self, path: str) -> str | None:
        """Return the GPU that the code runs on: `--gpu`, `[tool.mpguard] gpu`, or what the project names; or None."""
        with tracked_fs.recording_for(path):
            return self._gpu or settings.nearest(Path(path)).gpu or named_gpu.gpu(path)

    def required(self, path: str, package: str) -> Required:
        """Return the versions of a package that the project of a file requires, and the one around its copy."""
        folder = Path(path).absolute().parent
        with tracked_fs.recording_for(path):
            return required(str(folder), str(tree.outermost(folder)), package)

    def policies(self, path: str) -> list[Policy]:
        """Return the policies that the launch configs of a file name, else the one that its settings name.

        The recipe `auto`, which the machine of the launch decides, is not among them.
        """
        found: list[Policy | None] = []
        for config in self.configs_for(path):
            from mpguard.document import mp_yaml  # imports PyYAML, as reading the config has done

            with contextlib.suppress(MpguardError):  # the check of the config reports it
                found.append(mp_yaml.policy_of(config.document))
        with tracked_fs.recording_for(path):
            recipe = settings.nearest(Path(path)).recipe
        if recipe is not None and not any(found):
            with contextlib.suppress(MpguardError):
                found.append(recipes.recipe(recipe))
        return [each for each in found if each is not None and not each.name.startswith(recipes.AUTO)]

    def declared(self, path: str) -> Literal["training", "inference"] | None:
        """Return the kind of a file that `training-paths` and `inference-paths` declare."""
        with tracked_fs.recording_for(path):
            found = settings.nearest(Path(path))
        if matches(found.training_paths, found.root, path):
            return "training"
        return "inference" if matches(found.inference_paths, found.root, path) else None

    def configs_for(self, path: str) -> tuple[LaunchConfig, ...]:
        """Return the configs that a file is launched with.

        Those of `--config`, else of the settings, else those that the launch lines of its tree name, else those in
        its folder.

        In its folder: accelerate configs. There may be several, and it is unknown which one is used.
        A notebook is launched with none.
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
            found = self._in_folder(folder)
            return () if found and launch_configs.for_others(path, found) else found

    def launches_of(self, path: str) -> tuple[Launch, ...]:
        with tracked_fs.recording_for(path):
            top = tree.top_of(Path(path).absolute().parent)
            return launch_lines.in_tree(top).get(tracked_fs.real_path(path), ())

    def launches_given(self, path: str) -> tuple[Launch, ...]:
        with tracked_fs.recording_for(path):
            top = tree.top_of(Path(path).absolute().parent)
            return launch_lines.given_in_tree(top).get(tracked_fs.real_path(path), ())

    def named_in(self, name: str, path: str) -> Path | None:
        """Return the file that a command in a file names, if it is in the tree."""
        with tracked_fs.recording_for(path):
            return launch_lines.located(name, path, tree.top_of(Path(path).absolute().parent))

    def launched_with(self, config: str, option: str = "config_file") -> tuple[tuple[str, Launch], ...]:
        """Return the launch lines of the tree that name an accelerate config, each with the script that it starts.

        option: another option, which names another kind of file.
        """
        with tracked_fs.recording_for(config):
            return tuple(launch_configs.launched_with(config, option))

    def config_named(self, path: str, name: str) -> Document | None:
        """Return the config that a file names (`config="ds_config.json"`), in its folder or in one above it."""
        from mpguard import document

        with tracked_fs.recording_for(path):
            folder = Path(path).absolute().parent
            above = [folder, *folder.parents]
            inside = above[: above.index(tree.top_of(folder)) + 1]
            for candidate in (*(each / name for each in inside), Path(name)):
                try:
                    if tracked_fs.is_file(candidate) and (tracked_fs.size(candidate) or 0) <= LARGEST_CONFIG:
                        found = document.read(candidate)
                        found.require()
                        return found
                except (OSError, ValueError, ConfigError):
                    continue
        return None

    def deepspeed_half(self, path: str) -> str:
        with tracked_fs.recording_for(path):
            return siblings.deepspeed_half(Path(path).absolute().parent)

    def executed_settings(self, path: str, names: frozenset[str]) -> dict[str, list[object]]:
        found: dict[str, list[object]] = {}
        with tracked_fs.recording_for(path):
            for own, values in siblings.settings_in(Path(path).absolute().parent):
                for name, value in values.items() if own <= names else ():
                    found.setdefault(name, []).append(value)
        return found

    def source_of(self, module: str, from_path: str) -> Facts | None:
        """Return the facts of an imported module (`pkg.losses`, `.losses`), if it is in the linted tree.

        The tree is the folder of the nearest pyproject.toml, mpguard.toml or .git above the importing
        file, so that a file gets the same findings alone and with its folder; without one, and in
        site-packages, the outermost package that the file is in, or its folder. None if the module
        is elsewhere, does not parse, or the budget of the linted file is spent.
        """
        with tracked_fs.recording_for(from_path):
            path = tree.file_of(module, from_path)
        return self._facts_at(path, from_path) if path is not None else None

    def users_of(self, name: str, path: str) -> list[Facts] | None:
        file = Path(path).absolute()
        with tracked_fs.recording_for(path):
            files = summaries.users(tree.top_of(file.parent), file, name)
            if files is None or any((tracked_fs.size(each) or 0) > LARGEST_USER for each in files):
                return None
        places = files if Path(path).is_absolute() else map(os.path.relpath, files)
        found = [facts for each in places if (facts := self._facts_at(each, path)) is not None]
        return found if len(found) == len(files) else None

    def nearby(self, path: str, data: bytes) -> tuple[bytes, ...]:
        """Return the other modules of the program that a file is part of.

        Those that use it and may train, and what they import; if it may train itself, what it imports.
        """
        if self._nearby is None or self._nearby[0] != path:
            self._nearby = path, tuple(self._find_nearby(path, data))
        return self._nearby[1]

    def _find_nearby(self, path: str, data: bytes) -> Iterator[bytes]:
        file = Path(path).absolute()
        with tracked_fs.recording_for(path):
            users = summaries.users(tree.top_of(file.parent), file, "") or []
            seen = {str(file)}
            programs = [[program, *summaries.imported_files(program)] for program in users]
            if summaries.trains(data):
                programs.append(summaries.files_imported_by(data, str(file)))
            for each in itertools.chain.from_iterable(programs):
                if each not in seen and len(seen) <= MOST_NEARBY:
                    seen.add(each)
                    yield self._text(each)

    def _text(self, path: str) -> bytes:
        """Return the content of a module; empty for one that cannot be read, or is too large."""
        try:
            return tracked_fs.read_up_to(path, LARGEST_USER) or b""
        except OSError:
            return b""

    def _facts_at(self, path: str, from_path: str) -> Facts | None:
        """Return the facts of a module; None if it does not parse or the budget of the linted file is spent."""
        tracked_fs.add_dependency(from_path, path)
        key = os.path.realpath(path)
        self._used.setdefault(os.path.realpath(from_path), set()).add(key)
        if self._linted is not None and key == self._linted[0]:
            return self._linted[1]
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
            self._modules[key] = None  # while it is read: imports may be circular
            self._modules[key] = self._read(path)
        if (found := self._modules[key]) is not None:
            self._by_path[found.path] = found
        return found

    def used_elsewhere(self, path: str, name: str = "") -> bool:
        """True if other code may use a top-level name of a module; without a name, the module itself.

        False only if the whole project is known, nothing in its other files refers to it, and no package that other
        projects may install re-exports it. Outside of a project, other code is unknown.
        """
        file = Path(path).absolute()
        with tracked_fs.recording_for(path):
            top = tree.top_of(file.parent)
            if not tree.is_project(top) or ask(top, file, uses.may_use, name):
                return True
            return packages.exports_all(file) and packages.is_installable(top)

    def all_users_of(self, path: str, name: str) -> list[Facts] | None:
        """Return the facts of all other modules that may use a top-level name of a file; None if they are not known.

        They are not where a text or a config mentions the name, and in the interface of an installable package.
        """
        file = Path(path).absolute()
        with tracked_fs.recording_for(path):
            top = tree.top_of(file.parent)
            files = answered(top, file, uses.users, name) if tree.is_whole(top) else None
            if not isinstance(files, list) or (packages.exports_all(file) and packages.is_installable(top)):
                return None
        if len(files) > summaries.MOST_USERS or not all(each.endswith(PYTHON) for each in files):
            return None
        places = files if Path(path).is_absolute() else map(os.path.relpath, files)
        found = [facts for each in places if (facts := self._facts_at(each, path)) is not None]
        return found if len(found) == len(files) else None

    def parser_of(self, path: str, size: int) -> Callable[[str], Tree]:
        """Return what parses the statements of a file, once for its own check and for those of files that use it."""
        from mpguard.lint.source import incremental

        key = os.path.realpath(path)
        if key not in self._trees:
            self._kept_bytes += size
        return _kept_parser(self._trees.setdefault(key, {}), incremental.parse)

    def _read(self, path: str) -> Facts | None:
        from mpguard.lint.facts.file import Facts
        from mpguard.lint.source.source import Source
        from mpguard.lint.source.text import Unparsable

        try:
            with tracked_fs.recording_for(path):
                data = tracked_fs.read(path)
            source = Source.parse(data, path, check_syntax=False)
            source.tree_of = self.parser_of(path, len(data))
        except (OSError, Unparsable, RecursionError):
            return None
        return Facts(source, self, imported=True)


def _kept_parser(trees: dict[str, list[Tree]], parse_new: Callable[[str], Tree]) -> Callable[[str], Tree]:
    """Return a function that parses a statement once for all facts of a module; equal statements share no tree."""
    used: dict[str, int] = {}

    def parse(code: str) -> Tree:
        place = used[code] = used.get(code, -1) + 1
        known = trees.setdefault(code, [])
        if place == len(known):
            known.append(parse_new(code))
        return known[place]

    return parse
