"""What FP8 experts bring (`fp8_experts`): mixtures of two layers, compiled, against the same in BF16 under mpguard.

    python benchmarks/experts.py --output benchmarks/results/experts.json     # one Hopper GPU; most of it compiles
    python benchmarks/experts.py --only Mixtral --output FILE                 # one of the two, into what is there
    python benchmarks/experts.py --quick                                      # tries the program on a CPU

All variants of a size are built at the same time, and then train in turns, as in benchmarks/fp8.py, whose loops these
are. The base is BF16 under mpguard and not the script alone: that one computes experts in FP32 (S30).
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fp8
from fp8 import FP8, TORCHAO, Variant
from workers import END, Times, Worker, device, device_name, rows_in, serve, timed_round, versions

#: Name -> class of transformers, its config, batch and tokens. Few large experts, and many small ones.
SIZES: Mapping[str, tuple[str, Mapping[str, Any], int, int]] = {
    "Mixtral, 8 of 6144, 2x4096": (
        "Mixtral",
        {"hidden_size": 4096, "intermediate_size": 6144, "num_local_experts": 8, "num_key_value_heads": 8,
         "num_attention_heads": 32, "vocab_size": 16000},
        2, 4096,
    ),
    "Qwen3-MoE, 64 of 768, 2x4096": (
        "Qwen3Moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8,
         "num_key_value_heads": 4, "num_attention_heads": 32, "head_dim": 128, "vocab_size": 16000},
        2, 4096,
    ),
    "tiny": (
        "Mixtral",
        {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 4, "num_key_value_heads": 2,
         "num_attention_heads": 4, "vocab_size": 256},
        2, 32,
    ),
}  # fmt: skip

BASE = "bf16"
VARIANTS = {
    BASE: Variant("bf16_mixed", compiled=False),
    "fp8": Variant(FP8, TORCHAO, compiled=False),
    "fp8, experts": Variant(FP8, {**TORCHAO, "fp8_experts": True}, compiled=False),
    "experts alone": Variant(
        FP8, {**TORCHAO, "fp8_experts": True, "fp8_exclude": ("*_proj", "*lm_head")}, compiled=False
    ),
}

QUICK = (BASE, "fp8, experts")

#: Steps before the first round, and rounds and steps in each.
WARM_UP, ROUNDS, STEPS = 4, 3, 5


def trainer(size: str, variant: Variant) -> Callable[[], Any]:
    """Return a function that trains one step and returns the loss, not read yet. mpguard compiles every variant."""
    import mpguard

    policy = fp8.policy_of(variant)
    mpguard.activate(policy.replace(compile=True, name=policy.name) if device() == "cuda" else policy, enforce="warn")
    import torch
    import transformers

    name, fields, batch, tokens = SIZES[size]
    config = getattr(transformers, f"{name}Config")(
        **fields, num_hidden_layers=2, max_position_embeddings=tokens, use_cache=False, tie_word_embeddings=False,
        attn_implementation="sdpa", pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device()):
        model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(1, config.vocab_size, (batch, tokens), generator=generator).to(device()) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return fp8.training_step(model, optimizer, batches)


def work(size: str, name: str) -> None:
    """Train in this process: a round for each line on stdin, and kernels and proof at the end. The first builds it."""
    own: list[Callable[[], Any]] = []

    def prepare() -> tuple[dict[str, Any], Callable[[], Any]]:
        began = time.perf_counter()
        own.append(step := trainer(size, VARIANTS[name]))
        first = float(step())
        took = time.perf_counter() - began
        loss = [float(step()) for _ in range(WARM_UP)][-1]
        return {"loss": [first, loss], "first_step_s": took, "device": device_name()}, lambda: timed_round(step, STEPS)

    serve(prepare, lambda: {**fp8.memory(), **fp8.kernels(own[0]), **fp8.proven(VARIANTS[name]), **experts()})


def experts() -> dict[str, Any]:
    """Return what the proof says about the experts."""
    from mpguard.runtime.guard import current

    guard = current()
    proof = guard.proof if guard is not None else None
    found = [row.found for row in proof.rows if row.name == "fp8 experts"] if proof is not None else []
    return {"experts": found[0] if found else "in bf16"}


def measure(size: str) -> list[dict[str, Any]]:
    """Return a row per variant of a size: all train in turns, one round each."""
    names = QUICK if size == "tiny" else tuple(VARIANTS)
    workers = {name: Worker(f"{size}, {name}", [__file__, "--work", name, "--size", size]) for name in names}
    rows: dict[str, dict[str, Any]] = {}
    times = {name: Times() for name in workers}
    try:
        for worker in workers.values():
            worker.tell()
        for name, worker in workers.items():
            rows[name] = {"size": size, "variant": name, **fp8.answer(worker)}
        running = {name: worker for name, worker in workers.items() if "state" not in rows[name]}
        for _ in range(ROUNDS):
            for name, worker in running.items():
                times[name].add(worker.ask())
        for name, worker in running.items():
            rows[name] |= {**times[name].row(), **worker.ask(END, 60.0)}
    finally:
        for worker in workers.values():
            worker.end()
    base = statistics.median(times[BASE].ms) if times[BASE].ms else None
    for row in rows.values():
        if base is not None and "ms" in row:
            row["ratio"] = round(base / row["ms"], 3)
        print(text_of(row), flush=True)
    return list(rows.values())


def text_of(row: Mapping[str, Any]) -> str:
    name = f"{row['size']:30} {row['variant']:16}"
    if "ratio" not in row:
        return f"{name} {row.get('state', 'no base to compare with')}"
    kinds = " ".join(f"{kind} {ms}" for kind, ms in row.get("gpu", {}).items())
    share = row.get("rows", {}).get("fp8 products", "none in fp8")
    ran = f"loss {row['loss'][1]:.4f}, first step {row['first_step_s']:.0f} s, {row['proof']}, {share}"
    failures = "".join(f"\n    {each}" for each in row.get("failures", ()))
    times = f"{row['ms']:7.1f} ms ({row['lo']:.1f} to {row['hi']:.1f}): x{row['ratio']:.3f}"
    return f"{name} {times}, {row.get('gib', 0)} GiB, {ran}\n    {kinds}; experts {row['experts']}{failures}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file for the result")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries the program, measures nothing")
    parser.add_argument("--only", default="", metavar="SIZE", help="sizes with this in their name")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.size, options.work)
        return 0
    sizes = ["tiny"] if options.quick else [name for name in SIZES if name != "tiny" and options.only in name]
    rows = [row for size in sizes for row in measure(size)]
    if options.output:
        rows += [row for row in rows_in(options.output) if row["size"] not in sizes]
        sizes = list(dict.fromkeys(row["size"] for row in rows))
        result = {
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "versions": versions(fp8.LIBRARIES),
            "device": next((row["device"] for row in rows if "device" in row), None),
            "sizes": {name: SIZES[name] for name in sizes},
            "steps": {"warm_up": WARM_UP, "rounds": ROUNDS, "in_each": STEPS},
            "rows": rows,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any("state" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
