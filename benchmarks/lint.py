"""Measure the time and memory of the linter, compared with ruff and TorchFix in the same run.

    python benchmarks/lint.py EVIDENCE [--runs 5] [-j 2] [--every 20] [-o benchmarks/results/lint.json]

EVIDENCE is a folder; the source distributions of transformers and trl that benchmarks/evidence.py names are fetched
into it if they are missing, and TorchFix into its own virtual environment.

mpguard, ruff and `python -c pass` run in turn, so that a busy machine slows all equally; the figures are medians, and
`load` is its load average. "Cold" is the ordinary command with an empty cache, the writing of the cache included; the
files are in the system's memory after the first round, which is left out. "Cached" is the same command again. CPU
seconds are those of all processes together; by them mpguard is compared with `python -c pass`, since a busy machine
changes them less. Memory is the sum over all processes of their proportional shares (PSS), sampled every 20 ms in a
separate run. "MB parsed" is what libcst parsed, of the whole. "After a change" is a run with the cache, in a copy of
the tree, after a comment was added to one file. "In project" is a run over one file of that tree, and over it after an
edit.

TorchFix takes minutes: it checks every `--every`-th file, once, and its time is scaled by the bytes that those files
have of all; `--every 1` lets it check all of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import evidence

TORCHFIX = "0.7.0"
#: Size of the single file: one that users wait for while they edit it.
ONE_FILE = 40_000
#: A file that other files of its project use.
IN_PROJECT = "src/transformers/integrations/deepspeed.py"
#: The targets on 2 cores: times as long as ruff, as `python -c pass`, MiB, times faster than TorchFix.
BOUNDS = {
    "transformers.times_ruff": 3.6,
    "transformers.cached_times_python": 18.0,
    "transformers.mib_all_processes": 800,
    "one_file.times_python": 32.0,
    "in_project.times_python": 36.0,
    "in_project.after_edit_times_python": 45.0,
    "torchfix.times_mpguard": 150,
}
COMPILED = Path(tempfile.gettempdir(), f"mpguard-benchmark-pycache-{os.getuid()}")
SCRIPTS = Path(sysconfig.get_path("scripts"))


class Run(NamedTuple):
    seconds: float
    cpu: float


def once(command: Sequence[str | Path], folder: Path, cache: Path) -> Run:
    begin = time.perf_counter()
    environment = {**os.environ, "MPGUARD_CACHE_DIR": str(cache), "PYTHONPYCACHEPREFIX": str(COMPILED)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled, as installed packages are in the second run
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise SystemExit(f"{command[0]} ended with status {process.returncode}")
    return Run(seconds, usage.ru_utime + usage.ru_stime)


def times_python(runs: Sequence[Run], python: Sequence[Run]) -> float:
    """Return how many times the CPU seconds of `python -c pass` one process has needed."""
    return round(statistics.median(run.cpu for run in runs) / statistics.median(run.cpu for run in python), 1)


def median(runs: Sequence[Run]) -> dict[str, float]:
    return {
        "seconds": round(statistics.median(run.seconds for run in runs), 3),
        "cpu_seconds": round(statistics.median(run.cpu for run in runs), 3),
    }


def compared(folder: Path, what: str, runs: int, jobs: int) -> dict[str, Any]:
    """Run mpguard, cold and cached, ruff, and a Python that does nothing, in turn."""
    mpguard = [SCRIPTS / "mpguard", "lint", "--exit-zero", "-j", str(jobs), what]
    ruff = [SCRIPTS / "ruff", "check", "--no-cache", "--exit-zero", "--isolated", what]
    python = [sys.executable, "-c", "pass"]
    turns: dict[str, list[Run]] = {"cold": [], "cached": [], "ruff": [], "python": []}
    for turn in range(runs + 1):
        with tempfile.TemporaryDirectory() as cache:
            for name, command in (("cold", mpguard), ("cached", mpguard), ("ruff", ruff), ("python", python)):
                run = once(command, folder, Path(cache))
                if turn:
                    turns[name].append(run)
    figures = {name: median(each) for name, each in turns.items()}
    return {
        **figures,
        "times_ruff": round(figures["cold"]["seconds"] / figures["ruff"]["seconds"], 1),
        "times_python": times_python(turns["cold"], turns["python"]),
        "cached_times_python": times_python(turns["cached"], turns["python"]),
    }


# -- a small change -------------------------------------------------------------------------------------

#: Files of transformers that are changed: one that nothing else depends on, and one that many do.
CHANGED = ("src/transformers/models/t5/modeling_t5.py", "src/transformers/trainer_pt_utils.py")
#: The linter, which writes the number of files that it lints to the file that its first argument names.
_COUNTED = """\
import sys
from pathlib import Path
from mpguard.cli import main
from mpguard.lint.run.engine import Engine

run, counted = Engine.run, Path(sys.argv[1])

def write_and_run(engine, targets, *given):
    counted.write_text(str(len(targets)))
    return run(engine, targets, *given)

Engine.run = write_and_run
sys.exit(main(sys.argv[2:]))
"""


def after_change(folder: Path, changed: str, jobs: int) -> dict[str, Any]:
    """Return how many files are linted again after a change of one, and the time of that run."""
    with tempfile.TemporaryDirectory() as home:
        tree, cache, count = Path(home, "tree"), Path(home, "cache"), Path(home, "count")
        shutil.copytree(next(folder.glob("*/pyproject.toml")).parent, tree)
        time.sleep(3)  # findings are kept of files that have not changed for two seconds
        command = [sys.executable, "-c", _COUNTED, count, "lint", "--exit-zero", "-j", str(jobs), "."]
        once(command, tree, cache)
        with (tree / changed).open("a") as file:
            file.write("# a comment\n")
        time.sleep(3)
        run = once(command, tree, cache)
        return {"linted_again": int(count.read_text()), **median([run])}


def in_project(folder: Path, runs: int) -> dict[str, Any]:
    """Return the CPU seconds of a run over one file of a large project, and over it after an edit."""
    turns: dict[str, list[Run]] = {"cold": [], "after_edit": [], "python": []}
    with tempfile.TemporaryDirectory() as home:
        tree, cache = Path(home, "tree"), Path(home, "cache")
        shutil.copytree(next(folder.glob("*/pyproject.toml")).parent, tree)
        mpguard = [SCRIPTS / "mpguard", "lint", "--exit-zero", IN_PROJECT]
        for turn in range(runs + 1):
            time.sleep(3)  # findings are kept of files that have not changed for two seconds
            found = {"cold": once([*mpguard, "--no-cache"], tree, cache)}
            once(mpguard, tree, cache)
            with (tree / IN_PROJECT).open("a") as file:
                file.write("# a comment\n")
            time.sleep(3)
            found["after_edit"] = once(mpguard, tree, cache)
            found["python"] = once([sys.executable, "-c", "pass"], tree, cache)
            for name, run in found.items():
                if turn:
                    turns[name].append(run)
    return {
        "file": IN_PROJECT,
        **{name: median(each) for name, each in turns.items()},
        "times_python": times_python(turns["cold"], turns["python"]),
        "after_edit_times_python": times_python(turns["after_edit"], turns["python"]),
    }


# -- memory -------------------------------------------------------------------------------------------


def memory(folder: Path, jobs: int) -> int:
    """Return the peak memory of all processes of a cold run, in MiB."""
    command = [SCRIPTS / "mpguard", "lint", "--no-cache", "--exit-zero", "-j", str(jobs), "."]
    most = 0.0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, sum(map(pss, family(process.pid))))
            time.sleep(0.02)
    return round(most)


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it ended
    return found


def pss(pid: int) -> float:
    """Return the MiB of a process; shared memory counts by its share."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass  # it ended
    return 0.0


# -- what is read -------------------------------------------------------------------------------------


def parsed(folder: Path) -> dict[str, float]:
    """Return what one whole run parses: files and megabytes, and the totals."""
    from mpguard.lint.facts import file as facts
    from mpguard.lint.model.rule import rules
    from mpguard.lint.run.engine import Engine, Options
    from mpguard.lint.source.files import collect

    created: list[facts.Facts] = []

    class Counted(facts.Facts):
        def __init__(self, *given: Any, **named: Any) -> None:
            created.append(self)
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
        "files_parsed": len({each.path for each in created}),
        "mb_parsed": round(sum(each.parsed_bytes for each in created) / 1e6, 2),
    }


def one_file(folder: Path) -> Path:
    """Return the file nearest to `ONE_FILE` bytes of those that pass the prefilter."""
    from mpguard.lint.model.rule import Rule, rules
    from mpguard.lint.run.prefilter import relevant

    on = [rule for rule in rules(own_only=True).values() if issubclass(rule, Rule)]
    by_size = sorted(folder.rglob("*.py"), key=lambda path: (abs(path.stat().st_size - ONE_FILE), path))
    return next(path for path in by_size if relevant(path.read_bytes(), on)).relative_to(folder)


# -- TorchFix -----------------------------------------------------------------------------------------


def torchfix(folder: Path, home: Path, every: int) -> dict[str, Any]:
    """Return its seconds for all files of a folder, extrapolated from a sample."""
    environment = home / f".torchfix-{TORCHFIX}"
    if not environment.exists():
        venv.create(environment, with_pip=True)
        subprocess.run([environment / "bin" / "pip", "install", "-q", f"torchfix=={TORCHFIX}"], check=True)
    files = sorted(folder.rglob("*.py"))
    share = files[every // 2 :: every]
    size, of = sum(path.stat().st_size for path in share), sum(path.stat().st_size for path in files)
    with tempfile.TemporaryDirectory() as sample:
        for path in share:
            target = Path(sample, path.relative_to(folder))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        run = once([environment / "bin" / "torchfix", "."], Path(sample), Path(sample))
    return {
        "files": len(share),
        "mb": round(size / 1e6, 1),
        "seconds": round(run.seconds, 1),
        "seconds_for_all": round(run.seconds * of / size),
        "cpu_seconds_for_all": round(run.cpu * of / size),
    }


def measured(home: Path, runs: int, jobs: int, every: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    transformers, trl = home / "transformers", home / "trl"
    small = one_file(transformers)
    figures: dict[str, Any] = {
        "transformers": compared(transformers, ".", runs, jobs) | {"mib_all_processes": memory(transformers, jobs)},
        "trl": compared(trl, ".", runs, jobs),
        "one_file": {"file": str(small), **compared(transformers, str(small), runs, jobs)},
        "in_project": in_project(transformers, runs),
        "after_change": {changed: after_change(transformers, changed, jobs) for changed in CHANGED},
        "torchfix": torchfix(transformers, home, every),
    }
    slow, fast = figures["torchfix"]["seconds_for_all"], figures["transformers"]["cold"]["seconds"]
    figures["torchfix"]["times_mpguard"] = round(slow / fast)
    versions = {name: version(name) for name in ("mpguard", "libcst", "ruff")}
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **versions, "torchfix": TORCHFIX},
        "hardware": {"cpu": cpu(), "cores": os.cpu_count(), "jobs": jobs, "load": round(load, 1)},
        "runs": runs,
        "corpus": {"transformers": parsed(transformers), "trl": parsed(trl)},
        **figures,
        "bounds": {name: {"at": bound, "met": _met(figures, name, bound)} for name, bound in BOUNDS.items()},
    }


def _met(figures: dict[str, Any], name: str, bound: float) -> bool:
    value: Any = figures
    for part in name.split("."):
        value = value[part]
    return bool(value >= bound if name.startswith("torchfix") else value <= bound)


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def fetched(home: Path) -> None:
    """Download and unpack the package that is measured, if it is missing."""
    original = evidence.packages
    wanted = [package for package in original() if package.name in ("transformers", "trl")]
    evidence.packages = lambda: wanted
    try:
        evidence.fetch(home)
    finally:
        evidence.packages = original


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    options.evidence.mkdir(parents=True, exist_ok=True)
    fetched(options.evidence)
    figures = measured(options.evidence.absolute(), options.runs, options.jobs, options.every)
    text = json.dumps(figures, indent=2) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
