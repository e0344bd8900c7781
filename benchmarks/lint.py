"""How fast the linter is and how much memory it takes: a whole source distribution, against ruff in the same run.

    python benchmarks/evidence.py fetch evidence
    python benchmarks/lint.py evidence/transformers [--runs 5] [-j 2] [-o benchmarks/results/lint.json]

Both take turns, so that a busy machine slows both alike. "Cold" is without a cache of findings; the files are in the
system's memory after the first turn, which is left out. Memory is the sum over all processes of their proportional
shares (PSS), looked at every 20 ms. "MB parsed" is what libcst had to read, as against what there is.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: What issue 4 asks for, on 2 cores.
BOUND_SECONDS, BOUND_MIB = 6, 1024


class Run(NamedTuple):
    seconds: float
    mib: float


def once(command: Sequence[str | Path], folder: Path) -> Run:
    begin = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        most = 0.0
        while process.poll() is None:
            most = max(most, sum(map(pss, family(process.pid))))
            time.sleep(0.02)
    if process.returncode not in (0, 1):
        raise SystemExit(f"{command[0]} ended with status {process.returncode}")
    return Run(time.perf_counter() - begin, most)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it ended
    return found


def pss(pid: int) -> float:
    """MiB of a process; memory that it shares with others counts by its share."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass  # it ended
    return 0.0


def parsed(folder: Path) -> dict[str, float]:
    """What one whole run parses: files and megabytes, of how many."""
    from mpguard.lint.engine import Engine, Options
    from mpguard.lint.facts import file as facts
    from mpguard.lint.files import collect
    from mpguard.lint.rule import rules

    asked: list[facts.Facts] = []

    class Counted(facts.Facts):
        def __init__(self, *given: Any, **named: Any) -> None:
            asked.append(self)
            super().__init__(*given, **named)

    original, facts.Facts = facts.Facts, Counted  # type: ignore[misc]
    try:
        targets = [target for target in collect([str(folder)]).targets if target.kind == "python"]
        Engine(rules(own_only=True), Options()).run(targets)
    finally:
        facts.Facts = original  # type: ignore[misc]
    return {
        "files": len(targets),
        "mb": round(sum(target.size for target in targets) / 1e6, 1),
        "files_parsed": len({each.path for each in asked}),
        "mb_parsed": round(sum(each.parsed_bytes for each in asked) / 1e6, 2),
    }


def measured(folder: Path, runs: int, jobs: int) -> dict[str, Any]:
    scripts = Path(sysconfig.get_path("scripts"))
    commands: dict[str, list[str | Path]] = {
        "mpguard": [scripts / "mpguard", "lint", "--no-cache", "--exit-zero", "-j", str(jobs), "."],
        "ruff": [scripts / "ruff", "check", "--no-cache", "--exit-zero", "--isolated", "."],
    }
    turns: dict[str, list[Run]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, command in commands.items():
            run = once(command, folder)
            if turn:
                turns[name].append(run)
    medians = {name: statistics.median(run.seconds for run in each) for name, each in turns.items()}
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("mpguard", "libcst", "ruff")},
        "hardware": {"cores": os.cpu_count(), "jobs": jobs, "machine": platform.machine()},
        "corpus": parsed(folder),
        "runs": runs,
        "seconds": {name: round(median, 2) for name, median in medians.items()},
        "times_ruff": round(medians["mpguard"] / medians["ruff"], 1),
        "mib_all_processes": round(max(run.mib for run in turns["mpguard"])),
        "bounds": {"seconds": BOUND_SECONDS, "mib": BOUND_MIB},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = json.dumps(measured(options.folder, options.runs, options.jobs), indent=2) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
