"""Peak memory of a training with `watch` and with `sensitivity`, each in a process of its own, next to one without.

    python benchmarks/numerics_memory.py [--blocks 4] [--width 512] [--tokens 2048] [--rounds 3] [--output FILE]

What counts is the peak of the resident memory of a process on a CPU, of allocated memory on a GPU, after 12 steps: the
watch samples FP8 layers at steps 1 and 10, and sensitivity measures a quarter of the layers at each step from the
second on. The watched runs are compared with one whose layers are FP8, too (torchao, in software without a GPU).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from watch import Block, train_step

import mpguard
from mpguard.nn.format_names import LABELS
from mpguard.numerics.probe import Probe, ProbeSettings

#: Runs, and the run that each is compared with.
RUNS = {"plain": "plain", "sensitivity": "plain", "FP8": "FP8", "watch: light": "FP8", "watch: full": "FP8"}
STEPS = 12


def peak_of(run: str, options: argparse.Namespace) -> int:
    """Train in this process, and return the bytes that were in use at most."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.width) for _ in range(options.blocks))).to(device)
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(
        backend="torchao", first_last_layers_bf16=False, fp8_emulate=device == "cpu", compile=False
    )
    if RUNS[run] == "FP8":
        mpguard.convert(model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.randn(1, options.tokens, options.width, device=device)
    probe: Any = None
    if run == "sensitivity":
        probe = Probe(ProbeSettings(list(LABELS), policy, steps=STEPS), lambda _line: None)
        probe.find_layers()
    elif run.startswith("watch"):
        mpguard.watch(model, level="full" if run.endswith("full") else "light")
    for _ in range(STEPS):
        train_step(model, optimizer, x)
        if probe is not None:
            probe.step_ended(lambda: [model])
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(run: str, options: argparse.Namespace) -> int:
    """Return the peak of a run in a process of its own."""
    sizes = [f"--{name}={getattr(options, name)}" for name in ("blocks", "width", "tokens")]
    # Tensors are returned to the system at once, so that the peak is that of live ones.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, Path(__file__).resolve(), *sizes, "--run", run],
            capture_output=True, text=True, check=True, env=environment, cwd=folder,
        )  # fmt: skip
    return int(found.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.run:
        print(peak_of(options.run, options))
        return
    peaks = {run: int(statistics.median(measured(run, options) for _ in range(options.rounds))) >> 20 for run in RUNS}
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__, "date": datetime.date.today().isoformat(),
        "blocks": options.blocks, "width": options.width, "tokens": options.tokens, "rounds": options.rounds,
        "peak_mib": peaks,
        "more_mib": {run: peaks[run] - peaks[base] for run, base in RUNS.items() if run != base},
        "ratio": {run: round(peaks[run] / peaks[base], 3) for run, base in RUNS.items() if run != base},
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
