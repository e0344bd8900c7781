"""Select the findings of `mpguard lint` that count in a project with old ones: `--baseline`, `--diff-from`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mpguard.cli import lint_retired
from mpguard.cli.lint_options import flat
from mpguard.core.console import print_message
from mpguard.core.errors import ConfigError
from mpguard.lint.model.finding import Finding


def check(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for options that contradict each other."""
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
        raise ConfigError(f"--add-noqa suppresses what {fixing[1]} would fix; run one of them, then the other")
    if narrowing and fixing:
        raise ConfigError(
            f"{fixing[0]} applies to all findings, and {narrowing[0]} selects some of them; leave one out"
        )
    if options.write_baseline is not None and len(narrowing) > 1:
        other = next(name for name in narrowing if name != "--write-baseline")
        raise ConfigError(
            f"--write-baseline writes all findings, and {other} leaves some out; leave one of the options out"
        )
    if options.write_baseline is not None and options.output_file is not None:
        raise ConfigError(
            "--write-baseline writes a baseline, and no report for --output-file; run mpguard once for each"
        )
    if options.diff_from is not None and "-" in options.paths:
        raise ConfigError("--diff-from compares files with git, and stdin has no history; leave one of them out")


def report_unsuppressed(findings: Sequence[Finding]) -> None:
    """Print how many findings `--add-noqa` could not suppress, and what can."""
    if findings:
        what = "1 finding is left" if len(findings) == 1 else f"{len(findings):,} findings are left"
        print_message(
            f"{what}, which no comment can suppress (JSON and Markdown have no such comments, nor has a file "
            "that cannot be read); use `per-file-ignores` or --baseline"
        )


class Adoption:
    """The baseline and the git revision of the options. Raises `ConfigError`, before any file is checked."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.revision: str | None = options.diff_from
        self.select = None if options.select is None else flat(options.select)
        self.ignore = flat(options.ignore)
        if options.baseline is not None:
            from mpguard.lint.run.adoption import baseline

            self.file = Path(options.baseline)
            self.known, retired = baseline.without_retired(baseline.read(self.file))
            lint_retired.report_codes(str(self.file), retired)
        elif options.write_baseline is not None:
            from mpguard.lint.run.adoption import baseline

            self.file = Path(options.write_baseline)
            self.known, _ = baseline.without_retired(baseline.replaceable(self.file))
        self.from_baseline = options.baseline is not None
        if self.revision is not None:
            from mpguard.lint.run.adoption.git_diff import Changes

            self.changes = Changes(self.revision)

    def narrow(self, findings: Sequence[Finding], checked: Sequence[str]) -> tuple[list[Finding], dict[str, int]]:
        """Return the findings that count, and how many do not, by reason. checked: the paths that were checked."""
        counted, left_out = list(findings), {}
        if self.from_baseline:
            from mpguard.lint.run.adoption import baseline

            new, left = baseline.unknown(counted, self.known, self.file)
            left_out[f"known by {self.file}"] = len(counted) - len(new)
            counted = new
            gone = baseline.gone(Counter({key: left[key] for key in left if self._selects(key[1])}), checked, self.file)
            if gone:
                what = "1 known finding is" if gone == 1 else f"{gone} known findings are"
                print_message(f"{self.file}: {what} gone; --write-baseline removes {'it' if gone == 1 else 'them'}")
        if self.revision is not None:
            new = [finding for finding in counted if self.changes.touch(finding)]
            left_out[f"on lines unchanged since {self.revision}"] = len(counted) - len(new)
            counted = new
        return counted, {why: number for why, number in left_out.items() if number}

    def write(self, findings: Sequence[Finding]) -> int:
        """Write the baseline and return the exit status. Raise `ConfigError` if it cannot be written."""
        from mpguard.core.text_edits import write_atomically
        from mpguard.lint.run.adoption import baseline

        known = baseline.known_from(findings, self.file)
        try:
            write_atomically(self.file, baseline.written(known))
        except OSError as error:
            raise ConfigError(f"{self.file}: cannot be written: {error.strerror or error}") from None
        what = "1 finding" if len(findings) == 1 else f"{len(findings):,} findings"
        removed = sum((self.known - known).values())
        note = f" ({removed:,} earlier {'one' if removed == 1 else 'ones'} removed)" if removed else ""
        import shlex

        print(f"Wrote {what} to {self.file}{note}. Next: mpguard lint --baseline {shlex.quote(str(self.file))}")
        return 0

    def _selects(self, code: str) -> bool:
        """True if the command line selects a code; findings of a rule that it leaves out are not gone."""
        from mpguard.lint.model.rule import rules
        from mpguard.lint.model.selection import covers, resolved  # imports rule classes, which not every run needs

        every = rules()
        if self.select is not None and not any(covers(selector, code) for selector in resolved(self.select, every)):
            return False
        return not any(covers(selector, code) for selector in resolved(self.ignore, every))
