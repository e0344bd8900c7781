"""The cache of `mpguard lint`: where findings are kept between runs, and which runs share them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpguard.cli.lint_options import flat
from mpguard.core import settings, tracked_fs
from mpguard.core.console import print_message
from mpguard.lint.project import tree

if TYPE_CHECKING:
    from mpguard.lint.model.result import FileReport
    from mpguard.lint.run.cache.store import Cache
    from mpguard.lint.source.files import Target

FOLDER, VARIABLE = ".mpguard_cache", "MPGUARD_CACHE_DIR"


@contextlib.contextmanager
def recording(options: argparse.Namespace) -> Iterator[None]:
    """Record the files that findings depend on inside the block, unless the cache is off."""
    tracked_fs.clear_run_caches()
    if options.no_cache:
        yield
        return
    with tracked_fs.recording():
        yield


@dataclasses.dataclass
class EarlierReports:
    """The reports of earlier runs, and those that this run adds.

    rules: identifies the rules, None if they cannot be identified. fixing: files with findings are checked again.
    explicit: the user named the folder of the cache.
    """

    cache: Cache | None
    rules: str | None
    fixing: bool
    explicit: bool

    def known(self, targets: Sequence[Target]) -> list[FileReport | None]:
        """Return the earlier report of each file; None where the file or a dependency has changed."""
        if self.cache is None:
            return [None] * len(targets)
        reports = map(self.cache.known, targets)
        return [None if report is not None and report.findings and self.fixing else report for report in reports]

    def add(self, reports: Sequence[FileReport]) -> None:
        """Add reports for the next run."""
        if self.cache is not None and not self.fixing:
            self.cache.keep(reports)

    def write(self) -> None:
        """Write the cache. A folder that cannot be written is reported only if the user named it."""
        if self.cache is None or not self.cache.changed:
            return
        from mpguard.lint.run.cache.identity import identity

        try:
            if identity() == self.rules:  # otherwise the rules were changed during the run
                self.cache.write()
        except OSError as error:
            if self.explicit:
                reason = error.strerror or error
                print_message(f"{self.cache.folder}: cannot be written: {reason}; findings are not cached")


def open_cache(options: argparse.Namespace) -> EarlierReports:
    """Return the reports of earlier runs with the same options.

    The files that `--config` depends on must have been recorded under that name.
    """
    fixing = bool(options.fix or options.unsafe_fixes or options.diff or options.add_noqa)
    if options.no_cache:
        return EarlierReports(None, None, fixing, False)
    from mpguard.lint.run.cache.identity import identity
    from mpguard.lint.run.cache.store import Cache

    rules, (folder, explicit) = identity(), _folder()
    # A link in a repository may point anywhere; Path.is_symlink raises if a parent folder may not be entered.
    if rules is None or (os.path.islink(folder) and not explicit):  # noqa: PTH114
        return EarlierReports(None, None, fixing, False)
    trace = tracked_fs.trace("--config") if options.configs else None
    run = json.dumps([
        rules,
        os.getcwd(),  # noqa: PTH109
        None if options.select is None else flat(options.select),
        flat(options.extend_select),
        flat(options.ignore),
        options.preview,
        options.gpu,
        options.isolated,
        options.configs,
        tree.named(),
        sorted((*key, seen) for key, seen in trace.accesses.items()) if trace else [],
    ])  # fmt: skip
    key = tracked_fs.digest(run.encode("utf-8", "surrogateescape"))
    return EarlierReports(Cache(folder, key), rules, fixing, explicit)


def _folder() -> tuple[Path, bool]:
    """Return the folder, and True if the environment or the settings name it; else it is in the project's root."""
    configured = os.environ.get(VARIABLE)
    if configured:
        return Path(configured).absolute(), True
    here = Path.cwd()
    nearest = settings.nearest(here)
    if nearest.cache_dir:
        return nearest.root / nearest.cache_dir, True
    for folder in (here, *here.parents):
        if any(tracked_fs.type_of(str(folder / name)) for name in ("pyproject.toml", "mpguard.toml", ".git")):
            return folder / FOLDER, False
    return here / FOLDER, False
