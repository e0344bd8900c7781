"""Measure how long mpguard takes to start: medians in milliseconds, and ratios to `python -c pass`.

    python benchmarks/startup.py [--runs 25] [-o benchmarks/results/startup.json]

The commands are run in turn, so that a busy machine slows all of them equally. The start-up cost of the hook
is that of its line in a throw-away environment, against the same environment without it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpguard.cli.hook import LINE, NAME

#: The targets on a machine where `python -c pass` takes 11 ms.
BOUNDS_MS = {"version": 100, "lint_one_file": 450, "estimate": 1000, "hook": 1}

#: The example of docs/estimate.md: six strategies on all GPUs, and the largest batch.
ESTIMATE = ("estimate", "llama-3.1-8b", "--gpus", "8", "--batch", "2", "--seq", "4096", "--checkpointing")

_LOOP = """\
    for {name}_x, {name}_y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            {name}_loss = criterion(model({name}_x), {name}_y)
        scaler.scale({name}_loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def training_script(size: int) -> str:
    """Return a clean script of about `size` bytes that every rule about training must check."""
    parts = ["import torch\n\nscaler = torch.amp.GradScaler()\n"]
    while sum(map(len, parts)) < size:
        number = len(parts)
        parts.append(f"\n\ndef train_{number}(model, optimizer, criterion, loader):\n{_LOOP.format(name=f'v{number}')}")
    return "".join(parts)


def once(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Return the milliseconds from start to end of one process, and those in which it was running."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    taken, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    running = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return taken * 1000, running * 1000


def measured(commands: Mapping[str, Sequence[str]], folder: Path, runs: int) -> dict[str, list[tuple[float, float]]]:
    """Return the times of all commands, run in turn; the first round, which fills the caches, is left out."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MPGUARD_POLICY")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for run in range(runs + 1):
        for name, command in commands.items():
            taken = once(command, folder, environment)
            if run:
                times[name].append(taken)
    return times


def environment_with(folder: Path, hook: bool) -> str:
    """Return the Python of a new, empty environment, with or without the hook's line."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    if hook:
        printed = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        )
        Path(printed.stdout.strip(), NAME).write_text(LINE)
    return str(python)


def report(runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mpguard-startup-") as name:
        folder = Path(name)
        (folder / "small.py").write_text(training_script(15_000))
        (folder / "large.py").write_text(training_script(100_000))
        (folder / "conf").mkdir()
        (folder / "conf" / "mp.yaml").write_text(
            "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config: {backend: TE}\n"
        )
        mpguard = [str(Path(sys.executable).with_name("mpguard"))]
        both = measured(
            {
                "python_pass": [sys.executable, "-c", "pass"],
                "version": [*mpguard, "--version"],
                "lint_one_file": [*mpguard, "lint", "small.py"],
                "lint_100_kb": [*mpguard, "lint", "large.py"],
                "lint_one_config": [*mpguard, "lint", "conf/mp.yaml"],
                "estimate": [*mpguard, *ESTIMATE],
                "bare_without_hook": [environment_with(folder / "without", False), "-c", "pass"],
                "bare_with_hook": [environment_with(folder / "with", True), "-c", "pass"],
            },
            folder,
            runs,
        )
        imports_torch = {
            words[0]: "torch" in _modules(words, folder) for words in (["lint", "small.py"], list(ESTIMATE))
        }
    times = {key: [wall for wall, _ in values] for key, values in both.items()}
    medians = {key: statistics.median(values) for key, values in times.items()}
    differences = [
        with_ - without for with_, without in zip(times["bare_with_hook"], times["bare_without_hook"], strict=True)
    ]
    medians["hook"] = statistics.median(differences)
    return {
        "what": "start-up, wall clock of whole processes",
        "unit": "ms, median",
        "runs": runs,
        "medians": {key: round(value, 2) for key, value in medians.items()},
        "quartiles": {
            key: [round(q, 2) for q in statistics.quantiles(values, n=4)[::2]] for key, values in times.items()
        },
        "cpu_ms": {key: round(statistics.median(cpu for _, cpu in values), 2) for key, values in both.items()},
        "ratio_to_python_pass": {key: round(value / medians["python_pass"], 1) for key, value in medians.items()},
        "bounds": BOUNDS_MS,
        "torch_imported_to_lint": imports_torch["lint"],
        "torch_imported_to_estimate": imports_torch["estimate"],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            **{name: importlib.metadata.version(name) for name in ("mpguard", "libcst", "PyYAML", "rich", "pathspec")},
        },
    }


def _modules(words: Sequence[str], folder: Path) -> list[str]:
    """Return the modules that a command of mpguard has imported."""
    code = f"import sys\nfrom mpguard.cli import main\nmain({list(words)!r})\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "startup.json")
    options = parser.parse_args()
    result = report(options.runs)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    for key, value in result["medians"].items():
        ratio, bound = result["ratio_to_python_pass"][key], BOUNDS_MS.get(key)
        print(f"{key:20}{value:9.2f} ms {ratio:6.1f} x" + (f"   bound {bound} ms" if bound else ""))
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
