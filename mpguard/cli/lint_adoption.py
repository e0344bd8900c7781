"""Which findings of `mpguard lint` count in a project that has old ones: `--baseline`, `--diff-from`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mpguard.cli.lint_options import flat
from mpguard.core.errors import ConfigError
from mpguard.lint.model.finding import Finding


def check(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that contradict each other."""
    narrowing = [
        name
        for name, value in (
            ("--baseline", options.baseline),
            ("--write-baseline", options.write_baseline),
            ("--diff-from", options.diff_from),
        )
        if value is not None
    ]
    fixing = [
        name
        for name, on in (
            ("--add-noqa", options.add_noqa),
            ("--unsafe-fixes", options.unsafe_fixes),
            ("--fix", options.fix),
            ("--diff", options.diff and not options.add_noqa),
        )
        if on
    ]
    if options.add_noqa and len(fixing) > 1:
        raise ConfigError(f"--add-noqa suppresses what {fixing[1]} would mend; give one of them, then the other")
    if narrowing and fixing:
        raise ConfigError(f"{fixing[0]} changes all that is found, and {narrowing[0]} is about a part; leave one out")
    if options.write_baseline is not None and len(narrowing) > 1:
        other = next(name for name in narrowing if name != "--write-baseline")
        raise ConfigError(f"--write-baseline writes all that is found, and {other} takes some of it out; leave one out")
    if options.write_baseline is not None and options.output_file is not None:
        raise ConfigError(
            "--write-baseline writes the baseline, and no report that --output-file could take; run twice"
        )
    if options.diff_from is not None and "-" in options.paths:
        raise ConfigError("--diff-from is about files, and stdin has no history; leave one of them out")


def say_left(findings: Sequence[Finding]) -> None:
    """Says what `--add-noqa` could not do, and what can."""
    if findings:
        what = "1 finding is left" if len(findings) == 1 else f"{len(findings):,} findings are left"
        print(
            f"mpguard: {what}, which no comment can suppress (JSON has none, Markdown neither, nor has "
            "a file that cannot be read); `per-file-ignores` or --baseline can",
            file=sys.stderr,
        )


class Adoption:
    """The options as they are in force. Raises `ConfigError`, before anything is checked."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.revision: str | None = options.diff_from
        self.select = None if options.select is None else flat(options.select)
        self.ignore = flat(options.ignore)
        if options.baseline is not None:
            from mpguard.lint.run.adoption import baseline

            self.file = Path(options.baseline)
            self.known = baseline.read(self.file)
        elif options.write_baseline is not None:
            from mpguard.lint.run.adoption import baseline

            self.file = Path(options.write_baseline)
            self.known = baseline.replaceable(self.file)
        self.from_baseline = options.baseline is not None
        if self.revision is not None:
            from mpguard.lint.run.adoption.git_diff import Changes

            self.changes = Changes(self.revision)

    def narrowed(self, findings: Sequence[Finding], checked: Sequence[str]) -> tuple[list[Finding], dict[str, int]]:
        """The findings that count, and how many do not, by why. checked: the paths that they are from."""
        found, left_out = list(findings), {}
        if self.from_baseline:
            from mpguard.lint.run.adoption import baseline

            new, left = baseline.unknown(found, self.known, self.file)
            left_out[f"known by {self.file}"] = len(found) - len(new)
            found = new
            gone = baseline.gone(Counter({key: left[key] for key in left if self._asked(key[1])}), checked, self.file)
            if gone:
                what = "1 known finding is" if gone == 1 else f"{gone} known findings are"
                print(f"mpguard: {self.file}: {what} gone; --write-baseline takes them out", file=sys.stderr)
        if self.revision is not None:
            new = [finding for finding in found if self.changes.touch(finding)]
            left_out[f"on lines unchanged since {self.revision}"] = len(found) - len(new)
            found = new
        return found, {why: number for why, number in left_out.items() if number}

    def write(self, findings: Sequence[Finding]) -> int:
        """Writes the baseline. Raises `ConfigError`."""
        from mpguard.core.text_edits import write_atomically
        from mpguard.lint.run.adoption import baseline

        known = baseline.known_from(findings, self.file)
        try:
            write_atomically(self.file, baseline.written(known))
        except OSError as error:
            raise ConfigError(f"{self.file}: cannot be written: {error.strerror or error}") from None
        what = "1 finding is" if len(findings) == 1 else f"{len(findings):,} findings are"
        out = sum((self.known - known).values())
        but = f" ({out:,} that it knew before {'is' if out == 1 else 'are'} out)" if out else ""
        print(f"{what} known by {self.file} from now on{but}: mpguard lint --baseline {shlex.quote(str(self.file))}")
        return 0

    def _asked(self, code: str) -> bool:
        """Whether the command line lets a code's rule speak: what it leaves out is not gone."""
        from mpguard.lint.model.selection import covers  # with what rules are made of: not for each run

        if self.select is not None and not any(covers(selector, code) for selector in self.select):
            return False
        return not any(covers(selector, code) for selector in self.ignore)
