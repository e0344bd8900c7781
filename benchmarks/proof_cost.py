"""Measure what the proof costs a training loop: the first step, between looks, at a look, and over a whole run.

    python benchmarks/proof_cost.py [--device cpu|cuda] [--processes 2] [--rounds 3] [--models small] [--steps 512]
                                    [--seconds 240] [-o benchmarks/results/...json]

The same two loops run without and with `mpguard.activate("bf16_mixed")`, in processes of their own and in turn; several
processes train under DDP. Steps are measured in CPU time on the CPU, which does not count when a busy machine runs
something else, and in time until the device is done on a GPU. A ratio is that of two neighbouring runs; the result has
the median of these ratios, and the smallest and largest. `between_looks` compares the fastest tenths of the steps of a
run; `whole_run` the sums of the steps after the first, in which looks are. The result is added to those of other
machines in the file. With one GPU it takes a minute or more. Where time is short, `--models` and `--steps` make a run
shorter (at least 128 steps, or the looks are a large part of it), and with `--seconds` no round begins that would end
later: the result has the number of rounds that were made, and the ratios of one round have no range.

`--models "12 x 768, 16x1024"` is a short run of a transformer: fp8.py's Llama of this size, compiled, 130 steps, of
which seven may have a check. `mean_to_median` is how much of the median's ratio the mean keeps: 1 if checks cost
nothing. It stands in the file under a key of its own.
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Width, layers, batch and steps of the models. A step of the small one takes a few milliseconds.
MODELS = {
    "cpu": {"small": (128, 4, 64, 2048), "medium": (1024, 8, 64, 64)},
    "cuda": {"small": (512, 4, 64, 2048), "large": (4096, 16, 4096, 2048)},
}
#: Sizes of fp8.py, and the steps of a run of them.
TRANSFORMERS, STEPS = ("12 x 768, 16x1024", "12 x 768, 1x1024"), 130


def clock(device: str) -> Callable[[], float]:
    """Return the function that reads the time after a step."""
    import torch

    def when_done() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return when_done if device == "cuda" else time.process_time


def train(device: str, name: str, shape: tuple[int, int, int, int]) -> list[float]:
    """Return the seconds of each step of a loop."""
    import torch

    torch.manual_seed(0)
    width, layers, batch, steps = shape
    if name in TRANSFORMERS:
        return train_transformer(device, name, steps)
    blocks = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model: torch.nn.Module = torch.nn.Sequential(*blocks).to(device)
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, times, now = torch.randn(batch, width, device=device), [], clock(device)
    for _ in range(steps):
        began = now()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(inputs).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        times.append(now() - began)
    return times


def train_transformer(device: str, size: str, steps: int) -> list[float]:
    """Return the seconds of each step of a compiled Llama."""
    import torch
    from fp8 import SIZES, llama, training_step

    model, batches = llama(SIZES[size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if torch.distributed.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    step, times, now = training_step(torch.compile(model), optimizer, batches), [], clock(device)
    for _ in range(steps):
        began = now()
        step()
        times.append(now() - began)
    return times


def shapes(device: str, names: list[str], steps: int | None) -> dict[str, tuple[int, int, int, int]]:
    """Return the models with these names; all but transformers without names. steps: instead of their own number."""
    from fp8 import SIZES

    known = MODELS[device] | {name: (SIZES[name][0], *SIZES[name][4:6], STEPS) for name in TRANSFORMERS if names}
    chosen = {name: shape for name, shape in known.items() if not names or name in names}
    return {name: (*shape[:3], steps or shape[3]) for name, shape in chosen.items()}


def work(device: str, guarded: bool, loops: dict[str, tuple[int, int, int, int]]) -> None:
    """Print the seconds of each step of each loop, in a process of its own."""
    if guarded:
        import mpguard

        mpguard.activate("bf16_mixed")
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK") or 0)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.zeros(1, device=device) @ torch.zeros(1, device=device)  # the first product loads cuBLAS
    if "RANK" in os.environ:
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    times = {name: train(device, name, shape) for name, shape in loops.items()}
    if rank == 0:
        print(json.dumps(times), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        os._exit(0)  # torch's gloo group sometimes aborts or hangs where it is destroyed


def once(
    device: str, processes: int, guarded: bool, loops: dict[str, tuple[int, int, int, int]]
) -> dict[str, list[float]]:
    """Return the seconds of each step of each loop in new processes."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [__file__, "--worker", device, "guarded" if guarded else "stock", json.dumps(loops)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MPGUARD_")}
    done = subprocess.run(
        command, env={**environment, "OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True
    )
    others = f"{len(loops) - 1} other" if len(loops) > 1 else ""
    if done.returncode or (guarded and ("in force at steps 1-" not in done.stderr or others not in done.stderr)):
        raise SystemExit(f"the run failed, or was not proven:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def compared(runs: list[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Return what the proof costs in a loop. runs: the seconds of each step without and with it."""
    ratios: dict[str, list[float]] = {"between_looks": [], "whole_run": [], "median": [], "mean_to_median": []}
    first, looks, steps = list[float](), list[float](), list[float]()
    for stock, guarded in runs:
        looked = [2**power - 1 for power in range(1, len(guarded).bit_length())]
        involved = {0, *looked, *(number - 1 for number in looked)}  # a look begins when the step before has ended
        quiet = [taken for number, taken in enumerate(guarded) if number not in involved]
        more = {number: guarded[number] - statistics.median(quiet) for number in involved if number}
        ratios["between_looks"].append(_fast(quiet) / _fast(stock[1:]))
        ratios["whole_run"].append(sum(guarded[1:]) / sum(stock[1:]))
        ratios["median"].append(statistics.median(guarded[1:]) / statistics.median(stock[1:]))
        ratios["mean_to_median"].append(ratios["median"][-1] / ratios["whole_run"][-1])
        first.append(guarded[0] - stock[0])
        looks += [more[number] + more.get(number - 1, 0.0) for number in looked]
        steps.append(statistics.median(stock))
    return {
        "steps": len(runs[0][0]),
        "looks": len(looked) + 1,
        "step_ms": round(1000 * statistics.median(steps), 3),
        "first_step_more_ms": round(1000 * statistics.median(first), 1),
        "look_ms": round(1000 * statistics.median(looks), 3),
        "slowest_look_ms": round(1000 * max(looks), 3),
        **{f"{name}_ratio": round(statistics.median(values), 4) for name, values in ratios.items()},
        "smallest_and_largest": {
            name: [round(min(values), 4), round(max(values), 4)] for name, values in ratios.items()
        },
    }


def _fast(times: list[float]) -> float:
    return statistics.quantiles(times, n=10)[0]


def hardware(device: str) -> dict[str, Any]:
    """Return what the numbers were measured on."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "load_average": [round(load, 2) for load in os.getloadavg()]}
    if device == "cuda":
        import torch

        found["gpu"] = torch.cuda.get_device_name()
    return found


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3] == "guarded", json.loads(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(MODELS), default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    names = {*TRANSFORMERS, *(name for models in MODELS.values() for name in models)}
    parser.add_argument("--models", nargs="+", default=[], choices=sorted(names))
    parser.add_argument("--steps", type=int, help="of each model")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round that would end later")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "proof_cost.json")
    options = parser.parse_args()
    loops = shapes(options.device, options.models, options.steps)
    began, runs = time.monotonic(), list[tuple[dict[str, list[float]], dict[str, list[float]]]]()
    for number in range(options.rounds):
        passed = time.monotonic() - began
        if number and passed * (number + 1) / number > options.seconds:
            break
        stock = once(options.device, options.processes, False, loops)
        runs.append((stock, once(options.device, options.processes, True, loops)))
    result = {
        "what": f"time of training steps with mpguard against those without, bf16_mixed, {options.processes} process"
        + ("es, DDP" if options.processes > 1 else ""),
        "rounds": len(runs),
        "models": {
            name: {
                "width_layers_batch": shape[:3],
                **compared([(stock[name], guarded[name]) for stock, guarded in runs]),
            }
            for name, shape in loops.items()
        },
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": hardware(options.device),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("mpguard", "torch")},
        },
    }
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    short = f", {STEPS} steps" if set(loops) & set(TRANSFORMERS) else ""
    results[f"{options.device}, {options.processes}{short}"] = result
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(result["models"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
