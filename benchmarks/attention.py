"""What `is_causal` in compiled attention brings: transformers' Llama in BF16, stock and under mpguard, both compiled.

    python benchmarks/attention.py --output benchmarks/results/attention.json      # one GPU, under 90 s
    python benchmarks/attention.py --tiny                                          # tries the program itself on a CPU

Each variant trains in a process of its own: FP32 weights, BF16 autocast, fused AdamW, `torch.compile`. The processes of
one size compile together and then take turns, a round each, so that a busy neighbour hits all of them; the ratio is
that of the medians. `ms` is the time of a step with a synchronization after it, `flow` without one. The processes of
the next size have imported their libraries by then. Two processes of the first size fit into 139 GiB, four do not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers import Times, Worker, device, device_name, serve, timed_round, versions

LIBRARIES = ("torch", "transformers")

#: Name -> hidden size, FFN, heads, key and value heads, blocks, batch, tokens, vocabulary.
SIZES = {
    "4 Llama-3-8B blocks, 2x4096 tokens": (4096, 14336, 32, 8, 4, 2, 4096, 32000),
    "100M (12 x 768), 16x1024 tokens": (768, 3072, 12, 12, 12, 16, 1024, 32000),
}
TINY = {"tiny": (32, 64, 4, 2, 1, 2, 16, 64)}

#: Hidden size from which a padding mask of ones is not measured as well.
LARGE = 4096

#: Variant -> fields of the policy (None: without mpguard), and True for a padding mask of ones.
VARIANTS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "stock": (None, False),
    "mpguard": ({"bf16": True, "params_dtype": "fp32"}, False),
    "stock, mask of ones": (None, True),
    "mpguard, mask of ones": ({"bf16": True, "params_dtype": "fp32"}, True),
}

#: Steps before the first round, and rounds and steps in each.
WARM_UP, ROUNDS, STEPS = 5, 3, 6


def trainer(sizes: tuple[int, ...], variant: str) -> Callable[[], Any]:
    """Return a function that trains one step and returns the loss, not read yet."""
    fields, masked = VARIANTS[variant]
    if fields is not None:
        import mpguard

        mpguard.activate(mpguard.Policy(**fields))
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, ffn, heads, groups, blocks, batch, tokens, vocabulary = sizes
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=groups,
        num_hidden_layers=blocks, vocab_size=vocabulary, max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    where = device()
    with torch.device(where):
        model = LlamaForCausalLM(config).train()
        ids = torch.randint(0, vocabulary, (batch, tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    net = torch.compile(model, backend="inductor" if where == "cuda" else "aot_eager")
    inputs = {"attention_mask": torch.ones_like(ids)} if masked else {}

    def step() -> Any:
        optimizer.zero_grad()
        with torch.autocast(where, dtype=torch.bfloat16):
            loss = net(input_ids=ids, labels=ids, **inputs).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def work(sizes: tuple[int, ...], variant: str) -> None:
    """Train in this process: a round for each line on stdin. The first builds it."""
    import torch  # noqa: F401  while another size is measured
    import transformers  # noqa: F401

    def prepare() -> tuple[dict[str, Any], Callable[[], Any]]:
        began = time.perf_counter()
        step = trainer(sizes, variant)
        loss = [float(step()) for _ in range(WARM_UP)][-1]
        facts = {"loss": loss, "warm": time.perf_counter() - began, "device": device_name()}
        return facts, lambda: timed_round(step, STEPS)

    serve(prepare, dict)


def started(sizes: tuple[int, ...]) -> dict[str, Worker]:
    """Start a process for each variant, which waits for its turn."""
    return {
        variant: Worker(variant, [__file__, "--work", variant, "--sizes", json.dumps(sizes)])
        for variant, (_, masked) in VARIANTS.items()
        if not masked or sizes[0] < LARGE
    }


def measure(workers: dict[str, Worker]) -> list[dict[str, Any]]:
    """Return a row per variant of one size."""
    for worker in workers.values():
        worker.tell()
    rows = {variant: {"variant": variant, **worker.answer()} for variant, worker in workers.items()}
    times = {variant: Times() for variant in workers}
    for _ in range(ROUNDS):
        for variant, worker in workers.items():
            times[variant].add(worker.ask())
    for variant, row in rows.items():
        row.update(times[variant].row())
    for row in rows.values():
        row["ratio"] = round(rows["stock"]["ms"] / row["ms"], 3)
        row["flow_ratio"] = round(rows["stock"]["flow"] / row["flow"], 3)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file for the result")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: tries the program, measures nothing")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(tuple(options.sizes), options.work)
        return
    sizes = TINY if options.tiny else SIZES
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": versions(LIBRARIES),
        "sizes": {},
    }
    workers = {name: started(each) for name, each in sizes.items()}
    try:
        for name in sizes:
            rows = result["sizes"][name] = measure(workers[name])
            end(workers[name])
            print(name)
            for row in rows:
                result["device"] = row.pop("device")
                times = f"{row['ms']:8.1f} ms ({row['lo']:.1f} to {row['hi']:.1f})  x{row['ratio']:.3f}"
                flow = f"flow {row['flow']:8.1f} ms  x{row['flow_ratio']:.3f}"
                print(f"  {row['variant']:24} {times}  {flow}  loss {row['loss']:.4f}", flush=True)
    finally:
        for each in workers.values():
            end(each)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def end(workers: dict[str, Worker]) -> None:
    for worker in workers.values():
        worker.end()


if __name__ == "__main__":
    main()
