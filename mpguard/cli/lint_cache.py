"""Where `mpguard lint` keeps findings between runs, and which runs share them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpguard.cli.lint_options import flat
from mpguard.core import settings, tracked_fs
from mpguard.core.console import printable

if TYPE_CHECKING:
    from mpguard.lint.model.result import FileReport
    from mpguard.lint.run.cache.store import Cache
    from mpguard.lint.source.files import Target

FOLDER, VARIABLE = ".mpguard_cache", "MPGUARD_CACHE_DIR"


@contextlib.contextmanager
def recorded(options: argparse.Namespace) -> Iterator[None]:
    """Within it, what findings rest on is written down, if they are to be kept."""
    tracked_fs.clear_run_caches()
    if options.no_cache:
        yield
        return
    with tracked_fs.recording():
        yield


@dataclasses.dataclass
class Kept:
    """What is known from earlier runs, and what this one adds. fixing: files with findings are checked again."""

    cache: Cache | None
    rules: str | None
    fixing: bool
    asked: bool

    def known(self, targets: Sequence[Target]) -> list[FileReport | None]:
        """What became of each file before, where all that it rests on is as it was."""
        if self.cache is None:
            return [None] * len(targets)
        reports = map(self.cache.known, targets)
        return [None if report is not None and report.findings and self.fixing else report for report in reports]

    def add(self, reports: Sequence[FileReport]) -> None:
        """Takes in what became of files, for the next run."""
        if self.cache is not None and not self.fixing:
            self.cache.keep(reports)

    def write(self) -> None:
        """A folder that cannot be written is no trouble, unless it was asked for: runs without a cache are slower."""
        if self.cache is None:
            return
        from mpguard.lint.run.cache.identity import identity

        try:
            if identity() == self.rules:  # or the findings are those of rules that were changed meanwhile
                self.cache.write()
        except OSError as error:
            if self.asked:
                why = f"{self.cache.folder}: cannot be written: {error.strerror or error}; findings are not kept"
                print(f"mpguard: {printable(why)}", file=sys.stderr)


def opened(options: argparse.Namespace) -> Kept:
    """What is known for a run with these options. What was looked at for `--config` was recorded under that name."""
    fixing = bool(options.fix or options.unsafe_fixes or options.diff or options.add_noqa)
    if options.no_cache:
        return Kept(None, None, fixing, False)
    from mpguard.lint.run.cache.identity import identity
    from mpguard.lint.run.cache.store import Cache

    rules, (folder, asked) = identity(), _folder()
    # A link in a repository may lead anywhere; Path.is_symlink raises where a folder above may not be entered.
    if rules is None or (os.path.islink(folder) and not asked):  # noqa: PTH114
        return Kept(None, None, fixing, False)
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
        sorted((*key, seen) for key, seen in trace.looks.items()) if trace else [],
    ])  # fmt: skip
    return Kept(Cache(folder, tracked_fs.digest(run.encode("utf-8", "surrogateescape"))), rules, fixing, asked)


def _folder() -> tuple[Path, bool]:
    """The folder, and whether it was asked for: by the environment, the settings, or else where the project begins."""
    said = os.environ.get(VARIABLE)
    if said:
        return Path(said).absolute(), True
    here = Path.cwd()
    found = settings.nearest(here)
    if found.cache_dir:
        return found.root / found.cache_dir, True
    for folder in (here, *here.parents):
        if any(tracked_fs.type_of(str(folder / name)) for name in ("pyproject.toml", "mpguard.toml", ".git")):
            return folder / FOLDER, False
    return here / FOLDER, False
