"""Check real files with all rules, and try every fix: no rule may raise, no file may hang, the result of a fix must
parse, the same rule must report nothing in it, and nothing else may change.

    python benchmarks/fixes.py FOLDER [-j 2] [--every 5] [-o benchmarks/results/fixes.json]

FOLDER is what `evidence.py fetch` unpacked, or any other. Each file with a fixable finding is fixed in memory as it
is, with Windows line endings, and with a byte order mark, by safe and unsafe fixes of all rules, preview rules
included. The exit status is 1 if a condition is violated; no file is written. `slowest` are seconds of CPU time,
without the fixes; `not_read` are files that a limit or a syntax error excludes.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpguard.lint.model.result import CONFIG, SYNTAX, FileReport
from mpguard.lint.model.rule import rules
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run import workers
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target, collect

BOM = b"\xef\xbb\xbf"


def engine(fix: str | None) -> Engine:
    selectors = Selectors(select=("ALL",), preview=True)
    return Engine(rules(own_only=True), Options(selectors, fix=fix))  # type: ignore[arg-type]


PLAIN, MENDING = engine(None), engine("unsafe")


def variants(data: bytes) -> Iterator[tuple[str, bytes]]:
    yield "as it is", data
    if b"\r" not in data:
        yield "CRLF", data.replace(b"\n", b"\r\n")
    if not data.startswith(BOM) and b"coding" not in data[:200]:
        yield "BOM", BOM + data


def fixable(report: FileReport) -> collections.Counter[str]:
    return collections.Counter(each.code for each in report.findings if each.fix is not None)


@dataclasses.dataclass
class Outcome:
    """The outcome of one file. fixes: how many of each rule were tried; broken: the conditions that are violated."""

    path: str
    fixes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    broken: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0
    findings: int = 0
    not_read: str = ""
    memory: int = 0


def tried(target: Target) -> Outcome:
    begin = time.process_time()
    before = PLAIN.check(target)
    outcome = Outcome(target.path, fixable(before), seconds=time.process_time() - begin)
    outcome.broken = wrong = [f"{target.path}: {each.code} raised {each.error}" for each in before.defects]
    outcome.findings = len(before.findings)
    outcome.not_read = next((each.message for each in before.findings if each.code in (SYNTAX, CONFIG)), "")
    if outcome.fixes:
        _mended(target, wrong)
    outcome.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return outcome


def _mended(target: Target, wrong: list[str]) -> None:
    """Try all fixes on the variants of a file."""
    data = Path(target.path).read_bytes()
    for name, content in variants(data):
        given = Target(target.path, target.kind, named=True, data=content, size=len(content))
        wrong += [f"{target.path} ({name}): {what}" for what in laws(given, content)]


def laws(target: Target, content: bytes) -> Iterator[str]:
    report = MENDING.check(target)
    yield from (f"{each.code} raised {each.error}" for each in report.defects)
    if report.fix_result is None:
        yield "there are fixable findings, and nothing was fixed"
        return
    after = report.fix_result.after
    yield from report.fix_result.problems
    if left := fixable(report):
        yield f"after all fixes there are still fixable findings: {dict(left)}"
    if target.kind == "python":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(after)
        except (SyntaxError, ValueError) as error:
            yield f"the result does not parse: {error}"
    if content.startswith(BOM) != after.startswith(BOM):
        yield "the byte order mark came or went"
    if b"\r\n" in content and after.count(b"\n") != after.count(b"\r\n"):
        yield "line endings are mixed"
    if content.endswith(b"\n") != after.endswith(b"\n"):
        yield "the last line's end came or went"
    again = MENDING.check(Target(target.path, target.kind, named=True, data=after, size=len(after)))
    if again.fix_result is not None and again.fix_result.after != after:
        yield "a second run changes the file again"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-j", "--jobs", type=int, default=workers.available())
    parser.add_argument("--every", type=int, default=1, help="of all files, only each N-th")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    targets = [target for target in collect([str(options.folder)]).targets if target.problem is None][:: options.every]
    begin = time.perf_counter()
    outcomes = workers.run(
        targets,
        tried,
        lambda target, how: Outcome(target.path, broken=[f"{target.path}: the worker {how}"]),
        lambda target: target.size,
        options.jobs,
    )
    fixes = sum((each.fixes for each in outcomes), collections.Counter[str]())
    slow = sorted(outcomes, key=lambda each: -each.seconds)[:5]
    limits = [each for each in outcomes if each.not_read.startswith("parse limit")]

    def name(outcome: Outcome) -> str:
        return os.path.relpath(outcome.path, options.folder)

    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("mpguard", "libcst")}
        | {"python": platform.python_version()},
        "hardware": {"cores": os.cpu_count(), "machine": platform.machine()},
        "files": len(targets),
        "bytes": sum(target.size for target in targets),
        "python_files": sum(target.kind == "python" for target in targets),
        "findings": sum(each.findings for each in outcomes),
        "not_read": sum(bool(each.not_read) for each in outcomes),
        "limits": {name(each): each.not_read for each in limits},
        "slowest": {name(each): round(each.seconds, 2) for each in slow},
        "memory_mib": max(each.memory for each in outcomes),
        "seconds": round(time.perf_counter() - begin),
        "files_mended": sum(bool(each.fixes) for each in outcomes),
        "fixes_tried": dict(sorted(fixes.items())),
        "broken": [line for each in outcomes for line in each.broken],
    }
    text = json.dumps(result, indent=2) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text, end="")
    return int(bool(result["broken"]))


if __name__ == "__main__":
    sys.exit(main())
