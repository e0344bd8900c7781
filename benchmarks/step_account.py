"""What a check of a later step costs: a transformer of 12 x 768, eager and compiled, in one process and under DDP.

    python benchmarks/step_account.py [--before FOLDER] [--processes 1 2] [--checks 20] [--width 768]
                                      [--out benchmarks/results/step_account.json]

--before: the source of another mpguard, which is measured in turn with this one (`git archive REVISION mpguard plugins
| tar x -C FOLDER`). A check is the time of the step before it, which begins to record, and of the step itself, less
that of two steps without one; the result has medians over all checks of a process. On the CPU `check_ms` is CPU time of
rank 0, which does not count when a busy machine runs something else, and no waiting for other ranks; `wall_ms` counts
both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LAYERS, TOKENS, VOCABULARY = 12, 32, 256


def model_of(width: int) -> Any:
    """Return a transformer."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, tokens, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]

    class Net(nn.Module):  # dynamo would leave the layers of a Sequential in DDP uncompiled
        def __init__(self) -> None:
            super().__init__()
            blocks = [Block() for _ in range(LAYERS)]
            ends = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
            self.layers = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, *ends)

        def forward(self, ids: torch.Tensor) -> Any:
            return self.layers(ids)

    return Net()


def work(width: int, checks: int, *, compiled: bool) -> None:
    """Print what checks cost in this process."""
    import mpguard

    mpguard.activate("bf16_mixed")
    import torch
    from torch import nn

    from mpguard.runtime import guard as guards
    from mpguard.runtime.proof import trace

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    model = model_of(width).to(device)
    run = nn.parallel.DistributedDataParallel(model) if "RANK" in os.environ else model
    run = torch.compile(run) if compiled else run
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), device=device)
    operators = [0]
    read = trace.read

    def counting(events: list[Any], *args: Any, **options: Any) -> Any:
        operators[-1] += len(events)
        return read(events, *args, **options)

    trace.read = counting  # type: ignore[assignment]

    def step() -> tuple[float, float]:
        began = time.process_time(), time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(run(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.process_time() - began[0], time.perf_counter() - began[1]

    for _ in range(9):
        step()
    guard = guards.current()
    assert guard is not None and guard.proof is not None and guard.proof.in_force
    (progress,) = guard.run
    plain, costs = [], []
    for _ in range(checks):
        progress.next_check = progress.applied + 3
        plain.append(step())
        operators.append(0)
        costs.append([sum(both) for both in zip(step(), step(), strict=True)])
    assert len(progress.checks) >= checks, "the steps were not checked"
    cpu, wall = (1000 * statistics.median(column) for column in zip(*plain, strict=True))
    checked = [1000 * statistics.median(column) for column in zip(*costs, strict=True)]
    found = {
        "operators": int(statistics.median(operators[1:])),
        "step_ms": round(cpu, 1),
        "check_ms": round(checked[0] - 2 * cpu, 1),
        "wall_ms": round(checked[1] - 2 * wall, 1),
    }
    if int(os.environ.get("RANK") or 0) == 0:
        print(json.dumps(found), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        os._exit(0)  # torch's gloo group sometimes aborts or hangs where it is destroyed


def measured(source: Path | None, words: list[str], processes: int) -> dict[str, Any]:
    """Return what a new process, or a group of processes, prints. source: of mpguard; None for the installed one."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MPGUARD_")}
    environment |= {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": f"{source}:{source}/plugins"} if source else {})
    done = subprocess.run([*command, __file__, *words], env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def hardware() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    import torch

    found = {"cores": os.cpu_count(), "load_average": [round(load, 2) for load in os.getloadavg()]}
    return {**found, "gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--checks", type=int, default=20)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=["eager", "compiled"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.width, options.checks, compiled=options.worker == "compiled")
        return 0
    import torch

    results: dict[str, Any] = {
        "what": f"a check of a later step, {LAYERS} x {options.width}, bf16_mixed, median of {options.checks}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    for processes in options.processes:
        for kind in ("eager", "compiled"):
            words = ["--worker", kind, "--width", str(options.width), "--checks", str(options.checks)]
            sources = {"before": options.before, "now": None} if options.before else {"now": None}
            row = {name: measured(source, words, processes) for name, source in sources.items()}
            results[f"{kind}, {processes} process{'es' if processes > 1 else ''}"] = row
            print(json.dumps({f"{kind}, {processes}": row}), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
