"""What the watch costs: steps with and without it, interleaved in one run, so that only ratios count.

    python benchmarks/watch.py [--blocks 12] [--width 512] [--tokens 1024] [--rounds 8] [--steps 20] [--output FILE]

    python benchmarks/watch.py --blocks 4 --width 4096 --tokens 4096     blocks of an 8B model
    python benchmarks/watch.py --blocks 16 --width 2048 --tokens 512     a 1B model with short sequences
    python benchmarks/watch.py --blocks 2 --width 64 --tokens 16 --rounds 30 --steps 100     the smallest of models
    python benchmarks/watch.py --fp8 tensorwise --compile [--warmup 100 --steps 100]     with what FP8 layers round

With `--fp8` the layers are torchao's, computed in software without a GPU. Their tensors are sampled at steps 1, 10, 20
... 90, 100, 200 ...: the default of 25 steps before the measured ones shows what the first 100 steps cost.

It runs on the GPU if there is one. Each round trains with `off`, `light` and `full`, in another order each time; the
result is the median over rounds of a level's time over that of `off` in the same round. `host` is the same of the time
for which the process was running: other processes matter less to it, and on a CPU it is the result. `host_us` is what
a level adds to that time, in microseconds a step, between the fastest rounds: it hardly depends on the model. The
operators of torch that a level adds to a step, and how often it waits for the GPU, are counted apart from that.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpguard

LEVELS = ("off", "light", "full")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, width // 64, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        z: torch.Tensor = x + self.mlp(x)
        return z


def train_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = (model(x).float() - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def seconds(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int) -> tuple[float, float]:
    """Return the time of one step, over `steps` of them, and that of the host until the last one is queued."""
    cuda = x.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    began, host = time.perf_counter(), time.process_time()
    for _ in range(steps):
        train_step(model, optimizer, x)
    host = time.process_time() - host
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps if cuda else host / steps, host / steps


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # so are torch's own classes of modes
    """Counts the operators that are called."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def waits() -> Iterator[list[Any]]:
    """Collect the warnings about calls that wait for the GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        yield caught
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def counts(
    model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int, warmup: int
) -> dict[str, dict[str, float]]:
    """Return the operators and the waits of a step, by level."""
    found: dict[str, dict[str, float]] = {"operators": {}, "waits": {}}
    for level in LEVELS:
        mpguard.watch(level=level)
        seconds(model, optimizer, x, warmup)
        operators: Any = Operators()  # type: ignore[no-untyped-call]
        with waits() as caught, operators:
            for _ in range(steps):
                train_step(model, optimizer, x)
        found["operators"][level] = round(operators.total / steps, 1)
        found["waits"][level] = sum("synchroniz" in str(each.message) for each in caught) / steps
    mpguard.watch(level="off")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=25, help="steps at the start of a level that are not measured")
    parser.add_argument("--fp8", help="recipe of torchao's FP8 layers")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.width) for _ in range(options.blocks))).to(device)
    if options.fp8:
        policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(
            backend="torchao", fp8="hybrid" if options.fp8 == "tensorwise" else "e4m3", fp8_recipe=options.fp8,
            first_last_layers_bf16=False, fp8_emulate=device == "cpu", compile=False,
        )  # fmt: skip
        mpguard.convert(model, policy)
    if options.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.randn(1, options.tokens, options.width, device=device)
    seconds(model, optimizer, x, 3)
    ratios: dict[str, list[float]] = {level: [] for level in LEVELS[1:]}
    host: dict[str, list[float]] = {level: [] for level in LEVELS[1:]}
    running: dict[str, list[float]] = {level: [] for level in LEVELS}
    steps = []
    for number in range(options.rounds):
        order = LEVELS[number % 3 :] + LEVELS[: number % 3]
        times = {}
        for level in order:
            mpguard.watch(level=level)
            seconds(model, optimizer, x, options.warmup)  # beyond the first steps, at which norms are always computed
            times[level] = seconds(model, optimizer, x, options.steps)
        mpguard.watch(level="off")
        steps.append(times["off"][0])
        for level in LEVELS:
            running[level].append(times[level][1])
        for level in LEVELS[1:]:
            ratios[level].append(times[level][0] / times["off"][0])
            host[level].append(times[level][1] / times["off"][1])
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "blocks": options.blocks,
        "width": options.width,
        "tokens": options.tokens,
        "fp8": options.fp8,
        "compiled": options.compile,
        "warmup": options.warmup,
        "parameters": sum(own.numel() for own in model.parameters()),
        "step_ms": round(1000 * statistics.median(steps), 3),
        **{f"{level}_percent": round(100 * (statistics.median(found) - 1), 2) for level, found in ratios.items()},
        **{f"{level}_host_percent": round(100 * (statistics.median(found) - 1), 2) for level, found in host.items()},
        "host_us": {level: round(1e6 * (min(running[level]) - min(running["off"]))) for level in LEVELS[1:]},
        **(counts(model, optimizer, x, options.steps, options.warmup) if not options.compile else {}),
        "spread_percent": {
            level: [round(100 * (each - 1), 2) for each in sorted(found)] for level, found in ratios.items()
        },
    }
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
