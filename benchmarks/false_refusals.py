"""How often a right program is refused: 10,000 steps of programs of all kinds, with a check at every step.

python benchmarks/false_refusals.py [NAME ...] [--out benchmarks/results/false_refusals.json]

With names only these programs run, and replace what the file has of them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import false_refusal_programs
import torch
from false_refusal_programs import Right

import mpguard
from mpguard.core.errors import NotInForce
from mpguard.runtime import guard as guards
from mpguard.runtime import progress, run_end
from mpguard.runtime.patches.table import apply_patches
from mpguard.runtime.plan import Plan

#: Seconds that a program may take.
LIMIT = 900


def check(name: str, program: Right, seed: int, share: float) -> dict[str, Any]:
    """Run a program in this process, with a check at every step, and return what was found."""
    progress.EVERY_STEP = True
    apply_patches()
    if program.processes > 1:
        torch.distributed.init_process_group("gloo")
    false_refusal_programs.seed(seed)
    policy = mpguard.recipe(program.recipe)
    plan = Plan(policy, strategy=program.strategy, processes=program.processes, enforce="error", announced=True)
    guard = guards.Guard(plan)
    guards.set_current(guard)
    remarks: list[str] = []
    guard.reporter.print_once = remarks.append  # type: ignore[method-assign, assignment]
    guard.listen()
    refused = ""
    try:
        program.run(max(6, round(program.steps * share)))
        run_end.finalize(guard, 0)
    except NotInForce as error:
        refused = str(error)
    finally:
        guard.recorder.stop()
        guard.plan = dataclasses.replace(guard.plan, enforce="off")  # its hook on optimizers remains
    return {
        "program": name,
        "kind": program.kind,
        "steps": sum(each.applied for each in guard.run),
        "checks": sum(len(each.checks) for each in guard.run),
        "refused": refused,
        "remarks": sorted(set(remarks)),
    }


def _in_process(name: str, numbers: tuple[int, float], rank: int, port: int, path: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    program = false_refusal_programs.PROGRAMS[name]
    os.environ["WORLD_SIZE"] = str(program.processes)
    try:
        found = check(name, program, *numbers)
    except Exception as error:
        found = {"program": name, "kind": program.kind, "crashed": f"{type(error).__name__}: {error}"}
    path.write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def measure(name: str, program: Right, seed: int, share: float) -> dict[str, Any]:
    """Run a program in a process of its own, or in several, and return what the first rank found."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(rank)) for rank in range(program.processes)]
        started = [
            context.Process(target=_in_process, args=(name, (seed, share), rank, port, path))
            for rank, path in enumerate(paths)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(LIMIT)
            if process.is_alive():
                process.kill()
        found = [json.loads(path.read_text("utf-8")) if path.exists() else {} for path in paths]
    refused = [each.get("refused") or each.get("crashed") for each in found]
    first = found[0] or {"program": name, "kind": program.kind, "crashed": "no result"}
    return {**first, "refused": next(filter(None, refused), "")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of each program")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    options = parser.parse_args()

    def measured(pair: tuple[str, Right]) -> dict[str, Any]:
        row = measure(*pair, options.seed, options.share)
        counts = f"{row.get('steps', 0):5} steps {row.get('checks', 0):5} checks"
        print(f"{row['program']:36} {counts}  {row['refused'][:300] or 'proven'}", flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(measured, false_refusal_programs.named(options.names)))
    if options.names and options.out and options.out.exists():
        again = {row["program"]: row for row in rows}
        rows = [again.get(row["program"], row) for row in json.loads(options.out.read_text("utf-8"))["rows"]]
    result = {
        "torch": torch.__version__,
        "mpguard": mpguard.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": f"{_cpu()}, {torch.get_num_threads()} threads",
        "seed": options.seed,
        "programs": len(rows),
        "steps": sum(row.get("steps", 0) for row in rows),
        "checks": sum(row.get("checks", 0) for row in rows),
        "refused": sum(bool(row["refused"]) for row in rows),
        "kinds": dict(Counter(row["kind"] for row in rows)),
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
