"""How long the first step of a deep model takes in FP8, and how much of it is compilation.

    python benchmarks/compile_depth.py --output benchmarks/results/compile_depth.json     # one GPU with 139 GiB
    python benchmarks/compile_depth.py --only mpguard --output FILE                       # one row, into what is there
    python benchmarks/compile_depth.py --quick                                            # tries the program on a CPU

Llama-3-8B's 32 blocks, FP32 weights, BF16 autocast, SGD (AdamW's states do not fit beside them), 1x1024 tokens.
`mpguard` is a script that neither converts nor compiles: mpguard does both, block by block, and proves it. The others
are written by hand, with torchao's conversion: `whole` compiles the model as one graph, `blocks` compiles each block
with `Module.compile`, which compiles their code once, and leaves the rest of the model eager. `first_step_s` begins
when the model has been made, and includes conversion and proof; `compile_s` is dynamo's own account of its part.
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

import fp8
from workers import END, Worker, device, device_name, rows_in, serve, synchronize, timed_round, versions

#: Name -> hidden size, FFN, heads, key and value heads, blocks, batch, tokens, vocabulary.
SIZES = {
    "32 x 8B, 1x1024": (4096, 14336, 32, 8, 32, 1, 1024, 128256),
    "tiny": (64, 128, 4, 2, 4, 2, 32, 256),
}
VARIANTS = ("mpguard", "whole", "blocks")
ROUNDS, STEPS = 3, 8


def work(size: str, variant: str) -> None:
    """Train in this process; the first answer has the times of the first step."""
    import mpguard

    by_hand = variant != "mpguard"
    policy = mpguard.recipe("bf16_mixed") if by_hand else fp8.policy_of(fp8.Variant(fp8.FP8, compiled=False))
    mpguard.activate(policy if by_hand else policy.replace(compile=True), enforce="warn")
    import torch

    def prepare() -> tuple[dict[str, Any], Any]:
        model, batches = fp8.llama(SIZES[size])
        synchronize()
        began = time.perf_counter()
        if by_hand:
            fp8.convert_to_torchao(model)
            for module in [model] if variant == "whole" else model.model.layers:
                module.compile()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = fp8.training_step(model, optimizer, batches, autocast=not by_hand or device() == "cuda")
        float(step())
        first = time.perf_counter() - began
        second = -time.perf_counter()
        float(step())
        second += time.perf_counter()
        loss = [float(step()) for _ in range(fp8.WARM_UP)][-1]
        facts = {"first_step_s": first, "second_step_s": second, **compilation()}
        return {**facts, "loss": loss, "device": device_name()}, lambda: timed_round(step, STEPS)

    ends = fp8.VARIANTS["stock" if by_hand else "fp8, not compiled by the script"]
    serve(prepare, lambda: {**fp8.memory(), **fp8.proven(ends)})


def compilation() -> dict[str, Any]:
    """Return the seconds that dynamo spent on compiling, forward and backward, and the frames that it compiled."""
    from torch._dynamo.utils import calculate_time_spent, counters

    spent = calculate_time_spent()
    return {
        "compile_s": round(spent.get("total_wall_time", 0.0), 1),
        "compile_parts_s": {name: round(seconds, 1) for name, seconds in spent.items()},
        "graphs": counters["stats"].get("unique_graphs"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file for the result")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries the program, measures nothing")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS, help="these variants")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.size, options.work)
        return 0
    size = "tiny" if options.quick else next(iter(SIZES))
    rows = []
    for variant in options.only:  # one after the other: what is measured is the time of a compiler
        worker = Worker(f"{size}, {variant}", [__file__, "--work", variant, "--size", size])
        row: dict[str, Any] = {"size": size, "variant": variant}
        try:
            row |= worker.ask(timeout=300)
            rounds = [worker.ask() for _ in range(ROUNDS)]
            row |= {key: statistics.median(each[key] for each in rounds) for key in ("flow", "host")}
            row |= worker.ask(END, 60.0)
        except RuntimeError as error:
            row["state"] = f"failed: {error}"
        finally:
            worker.end()
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.output:
        rows += [row for row in rows_in(options.output) if row["variant"] not in options.only]
        result = {
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "versions": versions(fp8.LIBRARIES),
            "device": next((row["device"] for row in rows if "device" in row), None),
            "rows": rows,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any("state" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
