"""The engine: checks files, each with the reader of its kind, and applies fixes where that is requested."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mpguard.core import settings, tracked_fs
from mpguard.core.errors import PolicyError, SettingsError
from mpguard.lint.model.finding import Lines, placed
from mpguard.lint.model.result import CONFIG, SYNTAX, FileCheck, FileReport
from mpguard.lint.model.rule import Diagnostic
from mpguard.lint.model.selection import Rules, Selection, Selectors, ignored_in, selection
from mpguard.lint.project import summaries, tree_state
from mpguard.lint.project.launch_configs import LaunchConfig
from mpguard.lint.project.project import Project
from mpguard.lint.run import runner, timeout, workers
from mpguard.lint.run.readers import config, launch, markdown, notebook, python
from mpguard.lint.run.readers.context import Context, RulesByKind, not_checked
from mpguard.lint.source.files import FileKind, Target
from mpguard.policy import hardware, recipes

if TYPE_CHECKING:
    from mpguard.lint.source.incremental import Trees

_READERS: dict[FileKind, Callable[[bytes, Context], FileCheck]] = {
    "python": python.check,
    "config": config.check,
    "notebook": notebook.check,
    "markdown": markdown.check,
    "launch": launch.check,
}

#: Up to so many modules, a worker is started more slowly than it summarizes them.
_SUMMARIZED_ALONE = 100
#: What Git has in place of a file that Git LFS has not fetched.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run. configs: launch configs; fix: which fixes to apply, or comments to add."""

    selectors: Selectors = dataclasses.field(default_factory=Selectors)
    configs: tuple[LaunchConfig, ...] = ()
    gpu: str | None = None
    fix: Literal["safe", "unsafe", "noqa"] | None = None


class Engine:
    """Checks files, one after another. rules: all there are, by code.

    trees: set by a process that checks versions of the same files one after another (the editor's server).
    """

    def __init__(self, rules: Rules, options: Options) -> None:
        self.rules, self.options = rules, options
        self.project = Project(options.configs, options.gpu)
        self.trees: Trees | None = None
        self._selections: dict[Path | None, Selection] = {}
        self._rules_by_kind: RulesByKind = {}

    def run(
        self, targets: Iterable[Target], jobs: int = 1, on_progress: workers.OnProgress | None = None
    ) -> list[FileReport]:
        """Check all targets, in up to `jobs` processes. Raises `ConfigError` before the first one is checked.

        on_progress: called now and then with the number of files that are done, and of all.
        """
        targets = list(targets)
        folders = {os.path.dirname(os.path.abspath(target.path)) for target in targets}  # noqa: PTH100, PTH120
        for folder in map(Path, folders or {"."}):
            nearest = settings.nearest(folder)
            self._selected(nearest)
            if nearest.configs:
                self.project.configs_for(str(folder / "any.py"))
        if jobs > 1:
            _keep_summaries(targets, jobs)
        return workers.run(targets, self.check, _on_crash, lambda target: target.size, jobs, on_progress=on_progress)

    def check(self, target: Target) -> FileReport:
        """Check one file. Never raises: errors are in the report."""
        try:
            with timeout.computing(), tracked_fs.recording_for(target.path):
                return self._check(target)
        except timeout.TimeoutExceeded:
            self.project = Project(self.options.configs, self.options.gpu)  # it may contain partial results
            message = (
                f"parse limit: still not checked after {timeout.SECONDS} s of computing; exclude it if it is generated"
            )
            return self._unreadable(target, message)
        except Exception as error:
            return FileReport(target, defects=(runner.make_defect(target.path, "the engine", error),))

    def _check(self, target: Target) -> FileReport:
        if target.problem is not None:
            return self._unreadable(target, target.problem)
        if target.kind == "config" and not target.named and target.size > config.LARGEST_FOUND:
            tracked_fs.size(target.path)
            return FileReport(target, recognized=False, trace=tracked_fs.trace(target.path))
        try:
            data = tracked_fs.read(target.path) if target.data is None else target.data
        except OSError as error:
            return self._unreadable(target, f"the file cannot be read: {error.strerror or error}")
        with_project = not target.named and target.data is None
        checked = self.content(data, target, with_project)
        if self.options.fix is not None:
            return self._fixed(target, data, checked, with_project)
        trace = tracked_fs.trace(target.path) if target.data is None and not checked.defects else None
        return FileReport(
            target,
            tuple(checked.findings),
            tuple(checked.defects),
            recognized=checked.recognized,
            trace=trace,
            retired=checked.retired,
        )

    def _fixed(self, target: Target, data: bytes, checked: FileCheck, with_project: bool) -> FileReport:
        """Apply fixes, or add `noqa` comments; report what is left."""
        from mpguard.lint.run import fixer
        from mpguard.lint.run.adoption import noqa

        # As if the file were named: then the result of a fix is parsed, also where no rule's trigger is met any more.
        named = dataclasses.replace(target, named=True)
        check = functools.partial(self.content, target=named, with_project=with_project)
        recognized, before_fixes = checked.recognized, tuple(checked.findings)
        if self.options.fix == "noqa":
            result, checked = noqa.add_noqa(data, checked, check, target)
        else:
            result, checked = fixer.apply_fixes(data, checked, check, self.options.fix or "safe")
        return FileReport(
            target,
            tuple(checked.findings),
            tuple(checked.defects),
            result,
            recognized,
            before_fixes=before_fixes,
            retired=checked.retired,
        )

    def content(self, data: bytes, target: Target, with_project: bool = False) -> FileCheck:
        """Check some content of a file.

        with_project: as a part of its project, so that nothing is reported in code that the project does not use.
        """
        if data.startswith(_LFS_POINTER) and not target.named:
            return not_checked(recognized=False)
        selected = self.selection(target.path)
        self.project.begin(target.path)
        context = Context(target, selected, self.rules, self.project, self.trees, self._rules_by_kind, with_project)
        checked = _READERS[target.kind](data, context)
        pairs = sorted(zip(checked.findings, checked.diagnostics, strict=True), key=lambda pair: pair[0].order)
        checked.findings, checked.diagnostics = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return checked

    def selection(self, path: str) -> Selection:
        """Return the rules that are on for a file."""
        found = settings.of_file(path)
        if found.configs:  # a config that does not exist is an error even if no rule reads it
            self.project.configs_for(path)
        ignored = ignored_in(path, self.rules, found)
        return self._selected(found).without(ignored) if ignored else self._selected(found)

    def _selected(self, found: settings.ToolSettings) -> Selection:
        if found.source not in self._selections:
            _check_names(found)
            self._selections[found.source] = selection(self.rules, found, self.options.selectors)
        return self._selections[found.source]

    def _unreadable(self, target: Target, problem: str) -> FileReport:
        code = CONFIG if target.kind == "config" else SYNTAX
        if code not in self.selection(target.path).codes:
            return FileReport(target)
        diagnostic = Diagnostic(code, (0, 0), problem, self.rules[code].help)
        return FileReport(target, (placed(diagnostic, self.rules[code], target.path, Lines(""), {}),))


def _check_names(found: settings.ToolSettings) -> None:
    """Raise `SettingsError` if settings name a recipe or a GPU that does not exist: no rule would use it."""
    try:
        if found.recipe is not None:
            recipes.recipe(found.recipe)
        if found.gpu is not None:
            hardware.named(found.gpu)
    except PolicyError as error:
        raise SettingsError(f"{found.source}: {error}") from None


def _keep_summaries(targets: Iterable[Target], jobs: int) -> None:
    """Summarize modules in `jobs` processes; each worker that starts after it would summarize all of them otherwise."""
    code = (target.path for target in targets if target.kind == "python" and target.problem is None)
    files = summaries.to_keep(map(os.path.abspath, code))
    if _SUMMARIZED_ALONE < len(files) <= tree_state.MOST_FILES:
        found = workers.run(files, summaries.of_file, lambda _file, _how: None, lambda _file: 1, jobs)
        summaries.keep(dict(zip(files, found, strict=True)))


def _on_crash(target: Target, how: str) -> FileReport:
    """Report a crash of the parser on one file (deep nesting) as that file's finding."""
    from mpguard.lint.model.rule import rules

    diagnostic = Diagnostic(SYNTAX, (0, 0), f"parse limit: the process that read this file {how}")
    return FileReport(target, (placed(diagnostic, rules()[SYNTAX], target.path, Lines(""), {}),))
