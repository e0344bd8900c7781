"""What `mpguard lint` prints or writes: the report in its format, or the patch that the fixes are."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.core.console import Line, printable, write_lines, write_text
from mpguard.core.errors import ConfigError
from mpguard.lint.formats.terminal import TEXTS, Outcome, as_json, statistics, summary
from mpguard.lint.model.result import FileReport, FixResult


def check(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for what cannot be printed or written, before anything is checked."""
    if options.statistics and options.format not in (*TEXTS, "json"):
        raise ConfigError(f"--statistics is for people, and has no --format {options.format}; leave one of them out")
    report = "--statistics" if options.statistics else f"--format {options.format}"
    if (options.diff or options.write_baseline is not None) and report not in (f"--format {text}" for text in TEXTS):
        other = "--diff prints a patch" if options.diff else "--write-baseline writes the baseline"
        raise ConfigError(f"{report} is a report, and {other}; leave one of them out")
    if options.output_file is None:
        return
    if options.diff:
        raise ConfigError("--output-file takes the report, and --diff prints a patch; leave one of them out")
    file = Path(options.output_file)
    if tracked_fs.type_of(str(file)) == "folder" or tracked_fs.type_of(str(file.parent)) != "folder":
        what = "is a folder" if tracked_fs.type_of(str(file)) == "folder" else f"there is no folder `{file.parent}`"
        raise ConfigError(f"--output-file {file}: {what}; a file in a folder that is there is needed")


def report(options: argparse.Namespace, outcome: Outcome, to_stderr: bool) -> None:
    """Prints the report, or writes it to `--output-file`. Raises `ConfigError` where that cannot be written."""
    if options.output_file is not None:
        _write_file(Path(options.output_file), options, outcome)
        write_lines([summary(outcome)], sys.stderr)
        return
    stream = sys.stderr if to_stderr else sys.stdout
    text = _document(options, outcome)
    if text is None:
        write_lines(_lines_of(options, outcome), stream)
    elif text:
        write_text(f"{text}\n", stream)


def patch(reports: Iterable[FileReport], outcome: Outcome) -> None:
    """Prints what the fixes would change as a patch, and a summary to stderr."""
    for each in reports:
        if each.fix_result:
            data = _diff(each.target.path, each.fix_result)
            if sys.stdout.isatty():  # to be read, and not applied
                lines = data.decode("utf-8", "replace").split("\n")
                write_lines([(printable(line.rstrip("\r")), "")] for line in lines[:-1])
            else:
                print_bytes(data)
    write_lines([_would(outcome)], sys.stderr)


def print_bytes(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _document(options: argparse.Namespace, outcome: Outcome) -> str | None:
    """The report for another program; None where the format is for people."""
    if options.format in TEXTS:
        return None
    if options.format == "json":
        return as_json(outcome)
    from mpguard.lint import formats

    return formats.document(options.format, outcome)


def _lines_of(options: argparse.Namespace, outcome: Outcome) -> Iterable[Line]:
    return (statistics if options.statistics else TEXTS[options.format])(outcome)


def _write_file(file: Path, options: argparse.Namespace, outcome: Outcome) -> None:
    from mpguard.core.text_edits import write_atomically

    text = _document(options, outcome)
    if text is None:
        text = "\n".join("".join(piece for piece, _ in line) for line in _lines_of(options, outcome))
    data = f"{text}\n".encode(errors="backslashreplace") if text else b""
    try:
        if tracked_fs.type_of(str(file)) == "other":  # /dev/stdout: not to be replaced by a file
            file.write_bytes(data)
        else:
            write_atomically(file, data)
    except OSError as error:
        raise ConfigError(f"--output-file {file}: cannot be written: {error.strerror or error}") from None


def _diff(path: str, mended: FixResult) -> bytes:
    import difflib

    name = _quoted(path)
    before, after = (data.decode("utf-8", "surrogateescape") for data in (mended.before, mended.after))
    lines: list[str] = []
    for line in difflib.unified_diff(_lines(before), _lines(after), name, name):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


def _quoted(path: str) -> str:
    """A name as git writes it in a patch: one with a line break would be two lines of it."""
    if path.isprintable() and not set(path) & {'"', "\\"}:
        return path
    known = {ord('"'): '\\"', ord("\\"): "\\\\", 10: "\\n", 13: "\\r", 9: "\\t"}
    return '"' + "".join(known.get(b, chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in os.fsencode(path)) + '"'


def _lines(text: str) -> list[str]:
    return [line for line in text.replace("\n", "\n\0").split("\0") if line]


def _would(outcome: Outcome) -> Line:
    if not outcome.fixed:
        return summary(outcome)
    files = f"{outcome.fixed_files} file{'' if outcome.fixed_files == 1 else 's'}"
    left = f"; {len(outcome.findings)} would be left" if outcome.findings else ""
    verb = "suppress" if outcome.suppressed else "fix"
    return [(f"Would {verb} {outcome.fixed} problem{'' if outcome.fixed == 1 else 's'} in {files}{left}.", "bold")]
