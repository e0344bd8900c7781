"""`mpguard lint --watch`: the same report again whenever a file has changed that findings may rest on."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.core.console import printable, use_color
from mpguard.core.errors import ConfigError, MissingExtra, MpguardError
from mpguard.lint.formats.terminal import TEXTS
from mpguard.lint.source.files import CONFIG, MAKEFILES, MARKDOWN, NEVER, NOTEBOOK, PYTHON, SHELL

#: Files that findings may rest on, by the ends of their names.
_MATTER = (*PYTHON, *CONFIG, NOTEBOOK, *MARKDOWN, *SHELL, *MAKEFILES, ".toml", "setup.cfg", "Dockerfile", ".gitignore")
#: Milliseconds after which there is a turn without a change.
TURN_MS = 100
_CLEAR = "\x1b[2J\x1b[3J\x1b[H"


def check(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that make no sense together."""
    changing = [
        name
        for name, on in (
            ("--fix", options.fix),
            ("--unsafe-fixes", options.unsafe_fixes),
            ("--diff", options.diff),
            ("--add-noqa", options.add_noqa),
            ("--write-baseline", options.write_baseline is not None),
        )
        if on
    ]
    if changing:
        raise ConfigError(
            f"--watch looks at files while they are edited, and {changing[0]} is for one moment; leave one of them out"
        )
    if options.output_file is not None:
        raise ConfigError("--watch reports again and again, and --output-file takes one report; leave one of them out")
    if options.format not in TEXTS:
        raise ConfigError(
            f"--watch is for people, and --format {options.format} for one report; use {' or '.join(TEXTS)}"
        )
    if "-" in options.paths:
        raise ConfigError("--watch is about files, and stdin is none; leave one of them out")


def run(options: argparse.Namespace, once: Callable[[], int]) -> int:
    """Runs until Ctrl-C, which is how it is meant to end: the exit status is 0. What is wrong at the start ends it."""
    try:
        import watchfiles
    except ModuleNotFoundError:
        raise MissingExtra("watchfiles", "watch", "`mpguard lint --watch`") from None

    roots = _roots(options)
    with contextlib.suppress(KeyboardInterrupt):
        first = True
        try:
            # What changes while a report is made is told after it. Without a change there is a turn too: the first one
            # comes when the watch is on, so that nothing falls between the first report and the watch.
            for changes in watchfiles.watch(
                *roots,
                watch_filter=lambda change, path: (
                    matters(path, roots) or (change != watchfiles.Change.modified and is_tree(path, roots))
                ),
                rust_timeout=TURN_MS,
                yield_on_timeout=True,
                raise_interrupt=True,
            ):
                if first:
                    _clear()
                    once()
                    _say("watching; Ctrl-C ends")
                elif changes:
                    _again(sorted({os.path.relpath(path) for _, path in changes}), once)
                first = False
        except OSError as error:
            raise ConfigError(f"--watch: the files cannot be watched: {error}") from None
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return 0


def matters(path: str, roots: Iterable[Path]) -> bool:
    """Whether findings may rest on a file below one of the folders that are watched."""
    name = Path(path).name
    if not name.endswith(_MATTER) and not (name.startswith("requirements") and name.endswith(".txt")):
        return False
    return not name.startswith(".#") and NEVER.isdisjoint(_inside(path, roots))


def is_tree(path: str, roots: Iterable[Path]) -> bool:
    """Whether it is a folder that came or went with all that is in it, of which nothing else is told."""
    try:
        came = any(True for _ in Path(path).iterdir())
    except NotADirectoryError:
        return False
    except OSError:
        name = Path(path).name  # gone; what it was is not known, but vim tries a folder with a file `4913`
        came = not Path(path).suffix and not name.isdigit()
    return came and NEVER.isdisjoint(_inside(path, roots))


def _inside(path: str, roots: Iterable[Path]) -> tuple[str, ...]:
    return next((Path(path).relative_to(root).parts for root in roots if Path(path).is_relative_to(root)), ())


def _again(changed: list[str], once: Callable[[], int]) -> None:
    _clear()
    try:
        once()
    except MpguardError as error:  # settings are half written, a config is gone: the next change may mend it
        print(f"mpguard: {error}", file=sys.stderr)
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    _say(f"{', '.join(map(printable, changed[:3]))}{more} changed; watching")


def _roots(options: argparse.Namespace) -> set[Path]:
    """The trees of what is checked: modules, configs and settings that findings rest on lie there too."""
    from mpguard.lint.project.tree import top_of

    named = [Path(path).absolute() for path in (*(options.paths or ["."]), *options.configs)]
    tops = {top_of(path if tracked_fs.type_of(str(path)) == "folder" else path.parent) for path in named}
    return {top for top in tops if not any(other in top.parents for other in tops)}


def _clear() -> None:
    if sys.stdout.isatty() and use_color(sys.stdout):
        print(_CLEAR, end="", flush=True)


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)
