"""The output of `mpguard lint`: the report in its format, or the fixes as a patch."""

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
    """Raise `ConfigError` for output options that contradict each other, before any file is checked."""
    if options.statistics and options.format not in (*TEXTS, "json"):
        raise ConfigError(
            f"--statistics has no --format {options.format} (only {', '.join(TEXTS)}, json); leave one of them out"
        )
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
        raise ConfigError(f"--output-file {file}: {what}; a file in an existing folder is needed")


def report(options: argparse.Namespace, outcome: Outcome, to_stderr: bool) -> None:
    """Print the report, or write it to `--output-file`. Raise `ConfigError` if that cannot be written."""
    if options.output_file is not None:
        _write_file(Path(options.output_file), options, outcome)
        write_lines([summary(outcome)], sys.stderr)
        return
    stream = sys.stderr if to_stderr else sys.stdout
    text = _document(options, outcome)
    if text is None:
        write_lines(_lines_of(options, outcome), stream, fold=False)
    elif text:
        write_text(f"{text}\n", stream)


def patch(reports: Iterable[FileReport], outcome: Outcome) -> None:
    """Print what the fixes would change as a patch, and a summary to stderr."""
    for each in reports:
        if each.fix_result:
            data = _diff(each.target.path, each.fix_result)
            if sys.stdout.isatty():  # for reading, not for `patch`
                lines = data.decode("utf-8", "replace").split("\n")
                write_lines(([(printable(line.rstrip("\r")), "")] for line in lines[:-1]), fold=False)
            else:
                print_bytes(data)
    write_lines([_patch_summary(outcome)], sys.stderr)


def print_bytes(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _document(options: argparse.Namespace, outcome: Outcome) -> str | None:
    """Return the report for another program; None if the format is for people."""
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
        if tracked_fs.type_of(str(file)) == "other":  # a device such as /dev/stdout must not be replaced by a file
            file.write_bytes(data)
        else:
            write_atomically(file, data)
    except OSError as error:
        raise ConfigError(f"--output-file {file}: cannot be written: {error.strerror or error}") from None


def _diff(path: str, fixed: FixResult) -> bytes:
    import difflib

    name = _quoted(path)
    before, after = (data.decode("utf-8", "surrogateescape") for data in (fixed.before, fixed.after))
    lines: list[str] = []
    for line in difflib.unified_diff(_lines(before), _lines(after), name, name):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


def _quoted(path: str) -> str:
    """Return a file name as git writes it in a patch, where a line break in it would end the header line."""
    if path.isprintable() and not set(path) & {'"', "\\"}:
        return path
    escapes = {ord('"'): '\\"', ord("\\"): "\\\\", 10: "\\n", 13: "\\r", 9: "\\t"}
    return '"' + "".join(escapes.get(b, chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in os.fsencode(path)) + '"'


def _lines(text: str) -> list[str]:
    return [line for line in text.replace("\n", "\n\0").split("\0") if line]


def _patch_summary(outcome: Outcome) -> Line:
    if not outcome.fixed:
        return summary(outcome)
    files = f"{outcome.fixed_files} file{'' if outcome.fixed_files == 1 else 's'}"
    left = f"; {len(outcome.findings)} would remain" if outcome.findings else ""
    verb = "suppress" if outcome.suppressed else "fix"
    return [(f"Would {verb} {outcome.fixed} problem{'' if outcome.fixed == 1 else 's'} in {files}{left}.", "bold")]
