"""Train programs of each kind of parallelism on several GPUs under mpguard: proven, refused, or not finished.

    python benchmarks/parallel.py --output benchmarks/results/parallel.json                 # four GPUs, 5 minutes
    python benchmarks/parallel.py --only ddp "ep, hopper" --output FILE --merge             # some rows
    python benchmarks/parallel.py --gpus 2 --output benchmarks/results/parallel_two_gpus.json

Each row is a program of gpu_programs/parallel.py with a recipe, started by torchrun with a config of `mpguard init`
(`tp` and `pp`, which have no strategy there, by `mpguard.activate`). Some run at the same time, so that `first_step_s`,
with compilation, is an upper bound, and `step_ms` says little. A row that `--limit` ends is `not finished`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workers import device, device_name, versions

PROGRAM = Path(__file__).parent / "gpu_programs" / "parallel.py"
LIBRARIES = ("torch", "torchao", "triton", "mpguard")

#: Program -> its strategy for `mpguard init`; None for those that activate a recipe themselves.
PROGRAMS = {
    "ddp": "ddp", "fsdp2": "fsdp2", "hsdp": "fsdp2", "tp": None, "fsdp_tp": "fsdp2", "cp": "fsdp2", "pp": None,
    "pp_fsdp": "fsdp2", "ep": "ddp",
}  # fmt: skip
RECIPES = ("bf16_mixed", "hopper_bf16_with_fp8_mixed")

#: Inductor's processes per rank: with six programs of four ranks more would not have cores of their own.
COMPILE_THREADS = 5


def commands(program: str, recipe: str, gpus: int, port: int, folder: Path) -> list[list[str]]:
    """Return the commands that write the config, where there is one, and run the program."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(gpus), "--master_port", str(port)]
    strategy = PROGRAMS[program]
    if strategy is None:
        return [[*run, str(PROGRAM), program, "--recipe", recipe]]
    config = str(folder / "mp.yaml")
    words = ["init", recipe, "--strategy", strategy, "--num-processes", str(gpus), "-o", config]
    on_cpu = ["--emulate"] if device() == "cpu" and "fp8" in recipe else []
    return [
        [sys.executable, "-m", "mpguard", *words],
        [*run, "-m", "mpguard.run", "--config", config, *on_cpu, str(PROGRAM), program],
    ]


def run(program: str, recipe: str, gpus: int, port: int, limit: float) -> dict[str, Any]:
    """Run a program and return its row."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        cache = {"TORCHINDUCTOR_CACHE_DIR": name, "TRITON_CACHE_DIR": f"{name}/triton", "HANG": f"{limit:.0f}"}
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS), **os.environ, **cache}
        text, status = "", 0
        for command in commands(program, recipe, gpus, port, Path(name)):
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            try:
                text += process.communicate(timeout=limit)[0]
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks
                text += process.communicate()[0]
                status = 124
                break
            status = process.returncode
            if status:
                break
    return {"program": program, "recipe": recipe, **read(text, status), "seconds": round(time.monotonic() - began)}


def read(text: str, status: int) -> dict[str, Any]:
    """Return what the output of a program says.

    state: proven (in force at the end), proven at step 1 (not finished in time), refused, or failed.
    """
    lines = text.splitlines()
    first = next((line for line in lines if line.startswith("step 1 proven")), None)
    last = next((line for line in reversed(lines) if line.startswith("in force at steps")), None)
    refused = next((line for line in lines if line.startswith("mpguard: not in force")), None)
    result = next((json.loads(line.removeprefix("RESULT")) for line in lines if line.startswith("RESULT")), {})
    if status == 0 and first and last:
        state = "proven"
    elif refused:
        state = "refused"
    else:
        state = "proven at step 1, not finished" if first and status == 124 else "failed"
    rows = {
        name: found.group(1)
        for name in ("compute", "fp8", "reduction", "evaluation")
        if (found := re.search(rf"^  {name}\s{{2,}}(\S.*?)(?:\s{{2,}}\S.*)?$", text, re.MULTILINE))
    }
    said = refused or next((line for line in reversed(lines) if "Error" in line or line.startswith("mpguard: ")), "")
    more = {"reason": said} if state in ("refused", "failed") else {}
    return {"state": state, **result, "end": last, "rows": rows, **more}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file for the result")
    parser.add_argument("--merge", action="store_true", help="keep the rows of the file that are not measured again")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=3, help="programs that run at the same time")
    parser.add_argument("--limit", type=float, default=130.0, help="seconds of a program")
    parser.add_argument("--only", nargs="+", default=[""], help="rows with one of these in `PROGRAM, RECIPE`")
    options = parser.parse_args()
    wanted = [(each, recipe) for recipe in RECIPES for each in PROGRAMS]
    plan = [each for each in wanted if any(part in ", ".join(each) for part in options.only)]
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        begun = [
            pool.submit(run, *each, options.gpus, 29700 + number, options.limit) for number, each in enumerate(plan)
        ]
        rows = []
        for each in begun:
            rows.append(row := each.result())
            print(f"{row['program']:8} {row['recipe']:28} {row['state']}, {row.get('first_step_s')} s", flush=True)
    if options.output:
        write(options.output, rows, options)
    return 0 if all(row["state"] in ("proven", "refused") for row in rows) else 1


def write(path: Path, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write the result; with `merge` rows of the file stay that were not measured again."""
    old = json.loads(path.read_text("utf-8"))["rows"] if options.merge and path.exists() else []
    merged = {(row["program"], row["recipe"]): row for row in (*old, *rows)}
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device_name(),
        "gpus": options.gpus,
        "cores": os.cpu_count(),
        "versions": versions(LIBRARIES),
        "at_once": options.at_once,
        "limit_s": options.limit,
        "rows": list(merged.values()),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
