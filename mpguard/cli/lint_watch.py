"""`mpguard lint --watch`: check again whenever a file changes that findings may depend on."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.core.console import print_line, print_message, printable, use_color
from mpguard.core.errors import ConfigError, MissingExtra, MpguardError
from mpguard.lint.formats.terminal import TEXTS
from mpguard.lint.source.files import CONFIG, MAKEFILES, MARKDOWN, NEVER, NOTEBOOK, PYTHON, SHELL

#: Files that findings may depend on, by the end of their names.
_RELEVANT = (
    *PYTHON,
    *CONFIG,
    NOTEBOOK,
    *MARKDOWN,
    *SHELL,
    *MAKEFILES,
    ".toml",
    "setup.cfg",
    "Dockerfile",
    ".gitignore",
)
#: Milliseconds after which `watchfiles` yields even without a change.
YIELD_MS = 100
_CLEAR = "\x1b[2J\x1b[3J\x1b[H"


def check(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for options that contradict `--watch`."""
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
            f"--watch only reports, after each change, and {changing[0]} writes or prints once; leave one of them out"
        )
    if options.output_file is not None:
        raise ConfigError(
            "--watch prints a report after each change, and --output-file takes one report; leave one of them out"
        )
    if options.format not in TEXTS:
        raise ConfigError(
            f"--watch prints a report after each change, and --format {options.format} is a single document; "
            f"use {' or '.join(TEXTS)}"
        )
    if "-" in options.paths:
        raise ConfigError("--watch needs files, and `-` is stdin; leave one of them out")


def run(options: argparse.Namespace, once: Callable[[], int]) -> int:
    """Check until Ctrl-C, and return 0. An error in the first check ends the watch."""
    try:
        import watchfiles
    except ModuleNotFoundError:
        raise MissingExtra("watchfiles", "watch", "`mpguard lint --watch`") from None

    roots = _roots(options)
    with contextlib.suppress(KeyboardInterrupt):
        first = True
        try:
            # Changes during a check are yielded after it. The first yield comes without a change, once the watch is
            # active, so that no change between the first check and the start of the watch is missed.
            for changes in watchfiles.watch(
                *roots,
                watch_filter=lambda change, path: (
                    matters(path, roots) or (change != watchfiles.Change.modified and is_folder(path, roots))
                ),
                rust_timeout=YIELD_MS,
                yield_on_timeout=True,
                raise_interrupt=True,
            ):
                if first:
                    _clear()
                    once()
                    _print_status("watching for changes; press Ctrl-C to stop")
                elif changes:
                    _check_again(sorted({os.path.relpath(path) for _, path in changes}), once)
                first = False
        except OSError as error:
            raise ConfigError(f"--watch: the files cannot be watched: {error}") from None
    if sys.stderr.isatty():
        print_line("")  # after the ^C that the terminal shows
    return 0


def matters(path: str, roots: Iterable[Path]) -> bool:
    """True if findings may depend on a file in one of the watched folders."""
    name = Path(path).name
    if not name.endswith(_RELEVANT) and not (name.startswith("requirements") and name.endswith(".txt")):
        return False
    return not name.startswith(".#") and NEVER.isdisjoint(_inside(path, roots))


def is_folder(path: str, roots: Iterable[Path]) -> bool:
    """True if a path is a folder that was added or removed as a whole: its files get no events of their own."""
    try:
        relevant = any(True for _ in Path(path).iterdir())
    except NotADirectoryError:
        return False
    except OSError:
        name = Path(path).name  # removed, so its type is not known; vim creates and removes a file `4913`
        relevant = not Path(path).suffix and not name.isdigit()
    return relevant and NEVER.isdisjoint(_inside(path, roots))


def _inside(path: str, roots: Iterable[Path]) -> tuple[str, ...]:
    return next((Path(path).relative_to(root).parts for root in roots if Path(path).is_relative_to(root)), ())


def _check_again(changed: list[str], once: Callable[[], int]) -> None:
    _clear()
    try:
        once()
    except MpguardError as error:  # such as settings that are half written, which the next change may fix
        print_message(str(error))
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    _print_status(f"{', '.join(map(printable, changed[:3]))}{more} changed; watching for changes")


def _roots(options: argparse.Namespace) -> set[Path]:
    """Return the root folders of the checked paths, where the files that findings depend on are too."""
    from mpguard.lint.project.tree import top_of

    named = [Path(path).absolute() for path in (*(options.paths or ["."]), *options.configs)]
    tops = {top_of(path if tracked_fs.type_of(str(path)) == "folder" else path.parent) for path in named}
    return {top for top in tops if not any(other in top.parents for other in tops)}


def _clear() -> None:
    if sys.stdout.isatty() and use_color(sys.stdout):
        print(_CLEAR, end="", flush=True)


def _print_status(message: str) -> None:
    sys.stdout.flush()
    print_line(f"[{time.strftime('%H:%M:%S')}] {message}")
