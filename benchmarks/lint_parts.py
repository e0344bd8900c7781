"""Measure the parts of a lint run: CPU seconds over transformers' source distribution, and of rejected alternatives.

    python benchmarks/lint_parts.py EVIDENCE/transformers [-o benchmarks/results/lint_parts.json]

CPU seconds of one process, the best of three: a busy machine changes them little. docs/performance.md cites them.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import libcst

from mpguard.core import tracked_fs
from mpguard.lint.model.rule import Rule, rules
from mpguard.lint.run import prefilter
from mpguard.lint.run.cache.identity import identity
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import collect
from mpguard.lint.source.parser_limits import suspect
from mpguard.lint.source.source import Source

IMPORTS = ("argparse", "importlib.metadata", "yaml", "pathspec", "libcst", "mpguard", "mpguard.cli.lint",
           "mpguard.lint.run.engine", "mpguard.lint.facts.file")  # fmt: skip


def cpu(work: Callable[[], object], times: int = 3) -> float:
    best = float("inf")
    for _ in range(times):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return round(best, 3)


def start(code: str) -> float:
    """Return the CPU seconds of a Python process that runs some code, minus one that runs none."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def spent(program: str) -> float:
        found = []
        for _ in range(4):
            with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
                usage = os.wait4(process.pid, 0)[2]
                process.returncode = 0
            found.append(usage.ru_utime + usage.ru_stime)
        return min(found)

    return round(spent(code) - spent(""), 3)


def measured(folder: Path) -> dict[str, Any]:
    on = tuple(rule for rule in rules(own_only=True).values() if issubclass(rule, Rule) and not rule.preview)
    targets = [target for target in collect([str(folder)]).targets if target.kind == "python"]
    datas = [Path(target.path).read_bytes() for target in targets]
    awake = [data for data in datas if prefilter.relevant(data, on)]
    tokens = {token for rule in on for condition in rule.triggers for token in condition}
    sources = [Source(data, "x.py") for data in awake]
    texts = [source.text for source in sources]

    def run(collector: bool) -> None:
        engine = Engine(rules(own_only=True), Options())
        gc.collect()
        gc.enable() if collector else gc.disable()
        for target in targets:
            engine.check(target)
        gc.enable()

    parts = {
        "list": cpu(lambda: collect([str(folder)])),
        "read": cpu(lambda: [Path(target.path).read_bytes() for target in targets]),
        "digest": cpu(lambda: [tracked_fs.digest(data) for data in datas]),
        "gate": cpu(lambda: [prefilter.relevant(data, on) for data in datas]),
        "gate, every token of every rule": cpu(lambda: [[token in data for token in tokens] for data in datas], 1),
        "awake files: too deep for the parser?": cpu(lambda: [*map(suspect, texts)]),
        "awake files: Python's own parser": cpu(lambda: [*map(ast.parse, texts)]),
        "awake files: into statements": cpu(lambda: [Source(data, "x.py").chunks for data in awake]),
        "awake files: libcst, whole": cpu(lambda: [*map(libcst.parse_module, texts)], 1),
        "all, collector off": cpu(lambda: run(False), 2),
        "all, collector on": cpu(lambda: run(True), 2),
    }
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("mpguard", "libcst")}},
        "hardware": {"cores": os.cpu_count(), "machine": platform.machine(), "load": round(os.getloadavg()[0], 1)},
        "files": {"all": len(datas), "awake": len(awake)},
        "mb": {"all": round(sum(map(len, datas)) / 1e6, 1), "awake": round(sum(map(len, awake)) / 1e6, 1)},
        "cpu_seconds": parts,
        "cpu_seconds_to_import": {name: start(f"import {name}") for name in IMPORTS}
        | {"all rules": start("from mpguard.lint.model.rule import rules; rules()")},
        "cpu_seconds_of_identity": cpu(identity),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = json.dumps(measured(options.folder), indent=2) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
