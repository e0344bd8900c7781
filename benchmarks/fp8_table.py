"""Measure where FP8 pays: a block of Llama in BF16 and in FP8, by its width and the tokens of a step.

    python benchmarks/fp8_table.py --output benchmarks/results/fp8_table.json     # one Hopper GPU, 4 minutes
    python benchmarks/fp8_table.py --predictions benchmarks/results/fp8_table.json    # writes the package's table
    python benchmarks/fp8_table.py --tiny                                         # tries the program itself on a CPU

It is what the recipe `auto` decides by: `--predictions` writes the ratios to mpguard/policy/fp8_speed.json. Measured
are forward and backward pass of the blocks alone, without head and optimizer, whose time is the same in both: so the
sign of a difference holds for a model of any depth. A process per cell builds all of its arms, some cells at the same
time; then each cell times its arms in turns while all others wait.

`flow` is the time of a pass without synchronization, so that a host that cannot keep up counts, per block.

arms: BF16 compiled, FP8 of torchao compiled, the same without the layers that torchao's own rule leaves in BF16; and
not compiled BF16, and FP8 of Transformer Engine.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers import END, Worker, device, device_name, rows_in, serve, synchronize, versions

LIBRARIES = ("torch", "transformers", "torchao", "transformer-engine", "triton", "mpguard")

#: Name -> hidden size, FFN, heads, key and value heads, blocks.
SIZES = {
    "0.1B": (768, 3072, 12, 12, 2),
    "0.4B": (1024, 4096, 16, 16, 2),
    "1B": (2048, 8192, 32, 8, 2),
    "3B": (3072, 8192, 24, 8, 2),
    "8B": (4096, 14336, 32, 8, 1),
}
#: Sequences and their length, by the tokens of a step.
TOKENS = {1024: (1, 1024), 4096: (2, 2048), 16384: (8, 2048)}
TINY = {"tiny": (64, 128, 4, 2, 2)}, {64: (1, 64)}

ARMS = ("bf16", "torchao", "torchao, wide layers", "bf16, not compiled", "te, not compiled")

#: The ratios that the package has: kind of FP8 -> arm, and the arm of BF16 that the same script would run.
RATIOS = {
    "torchao": ("torchao", "bf16"),
    "torchao without narrow layers": ("torchao, wide layers", "bf16"),
    "te": ("te, not compiled", "bf16, not compiled"),
}
PREDICTIONS = Path(__file__).parent.parent / "mpguard" / "policy" / "fp8_speed.json"

#: Passes before the first round, rounds, and passes in each; cells that are built at the same time, and the most
#: seconds for that.
WARM_UP, ROUNDS, PASSES, AT_ONCE, BUILT = 5, 4, 8, 8, 240.0


def passes(arm: str, sizes: tuple[int, ...], batch: tuple[int, int]) -> Callable[[], None] | None:
    """Return a function that runs forward and backward pass of the blocks; None for an arm that is another one here."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    import mpguard

    hidden, ffn, heads, groups, blocks = sizes
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=groups,
        num_hidden_layers=blocks, vocab_size=16, max_position_embeddings=batch[1], use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device()):
        model: Any = LlamaModel(config).train()
        inputs = torch.randn(*batch, hidden).requires_grad_()  # FP32, as embeddings are under autocast
    if arm.startswith(("torchao", "te")):
        policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(
            first_last_layers_bf16=False, fp8_param=False, backend="te" if arm.startswith("te") else "torchao"
        )
        if device() == "cpu":
            policy = policy.replace(fp8_emulate=True)
        if "wide" in arm:
            narrow = sorted(f"*.{name}" for name in narrow_layers(model))
            if not narrow:
                return None
            policy = policy.replace(fp8_exclude=(*policy.fp8_exclude, *narrow))
        mpguard.convert(model, policy.replace(compile=False))
    run = model if "not compiled" in arm else torch.compile(model, backend=_backend(), dynamic=False)

    def one() -> None:
        with torch.autocast(device(), dtype=torch.bfloat16, enabled=device() == "cuda"):
            out = run(inputs_embeds=inputs).last_hidden_state
        out.backward(out.detach())
        for parameter in model.parameters():
            parameter.grad = None
        inputs.grad = None

    return one


def narrow_layers(model: Any) -> set[str]:
    """Return the names of the layers that torchao's rule leaves in BF16 (float8_linear_utils.py, tensorwise)."""
    from torch import nn

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {
        name.rpartition(".")[2]
        for name, module in linear.items()
        if module.in_features <= 4096 and module.out_features <= 1024
    }


def _backend() -> str:
    return "inductor" if device() == "cuda" else "aot_eager"


def work(sizes: tuple[int, ...], batch: tuple[int, int]) -> None:
    """Build the arms of a cell, and time them in turns."""
    import torch

    def prepare() -> tuple[dict[str, Any], Callable[[], Any]]:
        import mpguard

        mpguard.activate("bf16_mixed", enforce="off")  # compiled attention keeps `is_causal`, as under mpguard
        arms: dict[str, Callable[[], None]] = {}
        failed: dict[str, str] = {}
        for arm in ARMS:
            try:
                one = passes(arm, sizes, batch)
                if one is not None:
                    for _ in range(WARM_UP):
                        one()
                    synchronize()
                    arms[arm] = one
            except Exception as error:  # any error of a library is a result
                failed[arm] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if device() == "cuda":
                torch.cuda.empty_cache()
        return {"failed": failed, "device": device_name()}, lambda: timed(arms, sizes[-1])

    serve(prepare, dict)


def timed(arms: dict[str, Callable[[], None]], blocks: int) -> dict[str, Any]:
    """Return the microseconds of a block, for each arm: medians of rounds in turn."""
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm, one in arms.items():
            one()
            synchronize()
            began = time.perf_counter()
            for _ in range(PASSES):
                one()
            synchronize()
            times[arm].append((time.perf_counter() - began) * 1e6 / PASSES / blocks)
    return {
        "us": {arm: round(statistics.median(each), 1) for arm, each in times.items()},
        "lowest": {arm: round(min(each), 1) for arm, each in times.items()},
        "highest": {arm: round(max(each), 1) for arm, each in times.items()},
    }


Cell = tuple[str, int]


def measure(
    cells: list[Cell],
    sizes: dict[str, tuple[int, ...]],
    tokens: dict[int, tuple[int, int]],
    done: Callable[[Any], None],
) -> None:
    """Measure cells, some of which are built at the same time; `done` gets the row of each."""
    for first in range(0, len(cells), AT_ONCE):
        some = cells[first : first + AT_ONCE]
        words = [[__file__, "--work", json.dumps([sizes[size], tokens[count]])] for size, count in some]
        workers = [Worker(f"{size}, {count}", own) for (size, count), own in zip(some, words, strict=True)]
        try:
            for worker in workers:
                worker.tell()
            rows = [_answered(functools.partial(worker.answer, BUILT)) for worker in workers]
            for (size, count), worker, row in zip(some, workers, rows, strict=True):
                if "state" not in row:
                    row.update(_answered(worker.ask))
                    worker.tell(END)
                    worker.end()
                hidden, ffn, _, groups, blocks = sizes[size]
                shape = {"hidden": hidden, "ffn": ffn, "kv_heads": groups, "blocks": blocks}
                done({"size": size, "tokens": count, **shape, **row})
        finally:
            for worker in workers:
                worker.end()


def _answered(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return ask()
    except RuntimeError as error:
        return {"state": f"failed: {error}"}


def predictions(result: dict[str, Any]) -> dict[str, Any]:
    """Return how many times as fast FP8 is as BF16, by kind, width and tokens, for the package."""
    ratios: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in RATIOS}
    for row in result["rows"]:
        for kind, (fp8, bf16) in RATIOS.items():
            by_tokens = ratios[kind].setdefault(str(row["hidden"]), {})
            by_tokens[str(row["tokens"])] = round(row["us"][bf16] / row["us"][fp8], 3)
    (gpu,) = {row["device"] for row in result["rows"]}
    return {"gpu": gpu, "date": result["date"], "versions": result["versions"], "ratios": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file; cells that it has are kept")
    parser.add_argument("--tiny", action="store_true", help="a tiny block: tries the program itself")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="CELL", help="cells with one of these in `SIZE, TOKENS`"
    )
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="write the package's ratios from a JSON file")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*map(tuple, options.work))
        return 0
    if options.predictions:
        made = predictions(json.loads(options.predictions.read_text(encoding="utf-8")))
        PREDICTIONS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        return 0
    sizes, tokens = TINY if options.tiny else (SIZES, TOKENS)
    path = options.output
    kept = {(row["size"], row["tokens"]): row for row in rows_in(path) if "us" in row}
    cells = [
        (size, count)
        for count in tokens
        for size in sizes
        if (size, count) not in kept and any(word in f"{size}, {count}" for word in options.only)
    ]

    def done(row: dict[str, Any]) -> None:
        kept[row["size"], row["tokens"]] = row
        print(row["size"], row["tokens"], row.get("us", row.get("state")), row.get("failed", ""), flush=True)
        if path is not None:
            result = {
                "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
                "versions": versions(LIBRARIES),
                "rounds": {"warm_up": WARM_UP, "rounds": ROUNDS, "passes": PASSES},
                "rows": sorted(kept.values(), key=lambda each: (each["hidden"], each["tokens"])),
            }
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    measure(cells, sizes, tokens, done)
    return 0 if all("us" in row for row in kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
