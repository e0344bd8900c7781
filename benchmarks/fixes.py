"""Every fix on every real file: what it makes parses, the same rule is silent on it, and nothing else changed.

    python benchmarks/fixes.py FOLDER [-j 2] [-o benchmarks/results/fixes.json]

FOLDER is what `evidence.py fetch` unpacked, or any other. Each file with a fixable finding is mended in memory as it
is, with Windows line endings, and with a byte order mark, by safe and unsafe fixes of all rules, preview ones too.
The exit status is 1 if a law is broken; no file is written.
"""

from __future__ import annotations

import argparse
import ast
import collections
import datetime
import importlib.metadata
import json
import platform
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpguard.lint import workers
from mpguard.lint.engine import Engine, FileReport, Options
from mpguard.lint.files import Target, collect
from mpguard.lint.rule import rules
from mpguard.lint.selection import Selectors

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


def broken(target: Target) -> tuple[collections.Counter[str], list[str]]:
    """How many fixes of each rule were tried on a file, and which laws they broke."""
    before = PLAIN.check(target)
    tried = fixable(before)
    wrong = [f"{target.path}: {each.code} raised {each.error}" for each in before.defects]
    if not tried:
        return tried, wrong
    data = Path(target.path).read_bytes()
    for name, content in variants(data):
        given = Target(target.path, target.kind, named=True, data=content, size=len(content))
        wrong += [f"{target.path} ({name}): {what}" for what in laws(given, content)]
    return tried, wrong


def laws(target: Target, content: bytes) -> Iterator[str]:
    report = MENDING.check(target)
    yield from (f"{each.code} raised {each.error}" for each in report.defects)
    if report.mended is None:
        yield "there are fixable findings, and nothing was mended"
        return
    after = report.mended.after
    yield from report.mended.problems
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
    if again.mended is not None and again.mended.after != after:
        yield "a second run changes the file again"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-j", "--jobs", type=int, default=workers.available())
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    targets = [target for target in collect([str(options.folder)]).targets if target.problem is None]
    results = workers.run(
        targets,
        broken,
        lambda target, how: (collections.Counter(), [f"{target.path}: the worker {how}"]),
        lambda target: target.size,
        options.jobs,
    )
    tried = sum((each for each, _ in results), collections.Counter[str]())
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("mpguard", "libcst")}
        | {"python": platform.python_version()},
        "files": len(targets),
        "files_mended": sum(bool(each) for each, _ in results),
        "fixes_tried": dict(sorted(tried.items())),
        "broken": [line for _, wrong in results for line in wrong],
    }
    text = json.dumps(result, indent=2) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text, end="")
    return int(bool(result["broken"]))


if __name__ == "__main__":
    sys.exit(main())
