"""Measure how long the first step of a compiled FP8 model takes on several GPUs of one host, cold and warm.

    python benchmarks/first_step.py --ranks 4 --output benchmarks/results/first_step.json

A Llama of 8 blocks of width 1024 (120 M parameters) trains under DDP with `hopper_bf16_with_fp8_mixed`, each rank
compiling for its own device: as one graph, and block by block, each with empty caches and with those of the run before.
Written down per case: the seconds of the first step on each rank (the slowest counts), the median of the other steps,
and how many graphs inductor took from its cache. Needs Hopper GPUs, torchao and Triton.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, INNER, HEADS, LAYERS, VOCABULARY, TOKENS, ROWS, STEPS = 1024, 2816, 16, 8, 8192, 1024, 4, 20
LIBRARIES = ("torch", "torchao", "triton", "mpguard")

#: Cases in their order: the most blocks that are one graph. A warm one has the caches of the one before.
CASES = {
    "block by block, cold": 1,
    "block by block, warm": 1,
    "one graph, cold": LAYERS,
}


def train(most_blocks: int) -> None:
    """Train in one rank, and print what was measured as JSON."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch._dynamo.utils import counters

    import mpguard
    from mpguard.nn import compile as compilation

    compilation.MOST_BLOCKS_OF_RANKS = most_blocks
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    mpguard.activate("hopper_bf16_with_fp8_mixed")
    model = nn.parallel.DistributedDataParallel(_llama().cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found = {
        "first": round(seconds[0], 1),
        "median_ms": round(statistics.median(seconds[1:]) * 1e3, 1),
        "mean_ms": round(statistics.mean(seconds[1:]) * 1e3, 1),
        "slowest_ms": [round(each * 1e3) for each in sorted(seconds[1:])[-4:]],
        "graphs_from_cache": counters["inductor"]["fxgraph_cache_hit"],
        "graphs_compiled": counters["inductor"]["fxgraph_cache_miss"],
    }
    print(f"RANK {json.dumps(found)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _llama() -> Any:
    """Return a small Llama of transformers, with the head that its library declares."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        num_hidden_layers=LAYERS, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(config)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(tokens).logits
            return logits

    return Logits()


def measure(ranks: int, most_blocks: int, cache: Path, limit: int) -> dict[str, Any]:
    """Run one case, and return what its ranks measured; `first` is that of the slowest rank."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", __file__]
    command += ["--train", str(most_blocks)]
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    try:
        ended = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished in {limit} s"}
    found = [json.loads(line.partition("RANK ")[2]) for line in ended.stdout.splitlines() if "RANK {" in line]
    if len(found) != ranks:
        return {"error": f"status {ended.returncode}: {ended.stderr[-2000:]}"}
    lines = [line for line in ended.stderr.splitlines() if line.startswith("mpguard: comp")]
    return {**max(found, key=lambda each: float(each["first"])), "ranks": found, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--limit", type=int, default=180, help="seconds of one case")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train)
        return
    import torch

    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(0),
        "cores": os.cpu_count(),
        "ranks": arguments.ranks,
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, most_blocks in CASES.items():
            cache = Path(folder, str(most_blocks))
            case = measure(arguments.ranks, most_blocks, cache, arguments.limit)
            print(f"{name}: {json.dumps({key: value for key, value in case.items() if key != 'ranks'})}", flush=True)
            result["cases"][name] = case
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
