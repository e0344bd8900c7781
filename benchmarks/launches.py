"""What a kernel launch costs the CPU after torch's profiler has run, and what remains of that under mpguard.

    python benchmarks/launches.py --output benchmarks/results/launches.json      # one GPU, two minutes
    python benchmarks/launches.py --quick                                        # tries the program on a CPU

Three processes train the same small model, for which the GPU waits, and take turns: `stock`; `profiled`, in which
`torch.profiler` has recorded one step with CPU activity alone; and `mpguard`, whose proof records steps too.
`launch_us` is the time of one `x.add_(1)` of eight numbers until the next can be launched, `step_ms` that of a step
until all of its kernels are launched: medians of rounds. The ratios are those to `stock` in the same round: smallest,
median, largest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from workers import END, Worker, device, device_name, serve, synchronize, versions

VARIANTS = ("stock", "profiled", "mpguard")
#: Blocks, width, batch, tokens.
GPT, TINY = (12, 768, 1, 256), (2, 64, 1, 16)
#: Steps before the first round: after the looks of the proof at steps 1 to 32. The next ones are at 64 and 128.
WARM_UP, STEPS, LAUNCHES = 34, 24, 2000


def work(variant: str, shape: tuple[int, int, int, int]) -> None:
    """Train in this process: a round for each line on stdin."""
    import torch

    blocks, width, batch, tokens = shape

    def prepare() -> tuple[dict[str, Any], Any]:
        if variant == "mpguard":
            import mpguard

            mpguard.activate("bf16_mixed", enforce="warn")
        torch.manual_seed(0)
        heads = width // 64
        layers = [torch.nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0) for _ in range(blocks)]
        model = torch.nn.Sequential(*layers).to(device())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        x = torch.randn(tokens, batch, width, device=device())

        def step() -> None:
            with torch.autocast(device(), torch.bfloat16):
                loss = (model(x).float() - x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        step()
        if variant == "profiled":
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                step()
        for _ in range(WARM_UP):
            step()
        synchronize()
        return {"device": device_name()}, lambda: measured_round(step)

    serve(prepare, dict)


def measured_round(step: Any) -> dict[str, float]:
    """Return microseconds per launch and milliseconds per step, until the last is launched."""
    import torch

    x = torch.zeros(8, device=device())
    synchronize()
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(1)
    launch_us = (time.perf_counter() - began) * 1e6 / LAUNCHES
    synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    step_ms = (time.perf_counter() - began) * 1e3 / STEPS
    synchronize()
    return {"launch_us": launch_us, "step_ms": step_ms}


def measure(rounds: int, quick: bool) -> dict[str, Any]:
    words = ["--quick"] if quick else []
    workers = {each: Worker(each, [__file__, "--work", each, *words]) for each in VARIANTS}
    try:
        facts = {name: worker.ask() for name, worker in workers.items()}
        found = [{name: worker.ask() for name, worker in workers.items()} for _ in range(rounds)]
        for worker in workers.values():
            worker.ask(END)
    finally:
        for worker in workers.values():
            worker.end()
    rows = {}
    for name in VARIANTS:
        row: dict[str, Any] = {}
        for what in ("launch_us", "step_ms"):
            row[what] = round(statistics.median(each[name][what] for each in found), 3)
            ratios = [each[name][what] / each["stock"][what] for each in found]
            row[f"{what}_ratio"] = [round(value, 3) for value in (min(ratios), statistics.median(ratios), max(ratios))]
        rows[name] = row
    return {
        "device": facts["stock"]["device"],
        "date": datetime.date.today().isoformat(),
        "versions": versions(("torch", "mpguard")),
        "rounds": rounds,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the result file, JSON")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, TINY if options.quick else GPT)
    result = measure(options.rounds, options.quick)
    text = json.dumps(result, indent=2) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
