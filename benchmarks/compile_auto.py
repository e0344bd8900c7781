"""Measure where torch.compile makes FP8 faster: the facts behind `compile: auto` (mpguard/nn/compile.py).

    python benchmarks/compile_auto.py --output benchmarks/results/compile_auto.json

Times steps of a Llama of transformers as `accelerate` trains it (FP32 weights, BF16 autocast, AdamW), converted by
mpguard, eager and compiled. Needs one Hopper GPU without other work, Transformer Engine, torchao and transformers.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mpguard
from mpguard.policy.policy import Policy

LIBRARIES = ("torch", "transformers", "torchao", "transformer-engine", "mpguard")
WARM, TIMED = 5, 11

#: Blocks, width, width inside the MLP, heads, and the batch.
SIZES = {"width 4096": (4, 4096, 14336, 32, (2, 4096)), "width 2048": (4, 2048, 5632, 16, (1, 2048))}

RECIPES: dict[str, Policy | None] = {
    "bf16": None,
    "te current": Policy(bf16=True, fp8="hybrid", backend="te"),
    "te block": Policy(bf16=True, fp8="e4m3", fp8_recipe="blockwise", backend="te"),
    "te delayed": Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=16, backend="te"),
    "torchao tensorwise": Policy(bf16=True, fp8="hybrid", backend="torchao"),
}


def milliseconds(size: str, policy: Policy | None, compiled: bool) -> float:
    """Return the median of the timed steps."""
    blocks, width, inner, heads, batch = SIZES[size]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=width, intermediate_size=inner, num_hidden_layers=blocks,
                num_attention_heads=heads, num_key_value_heads=heads, use_cache=False, tie_word_embeddings=False,
            )
        )  # fmt: skip
        tokens = torch.randint(0, 256, batch)
    if policy is not None:
        mpguard.convert(model, policy.replace(compile=False))
    run = torch.compile(model) if compiled else model
    optimizer, times = torch.optim.AdamW(model.parameters(), fused=True), []
    for _ in range(WARM + TIMED):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return round(sorted(times[WARM:])[TIMED // 2], 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="sizes and recipes with this in `SIZE, RECIPE`; others are kept")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    if options.output.exists():
        found = json.loads(options.output.read_text(encoding="utf-8"))["milliseconds"]
    result = {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name(),
        "versions": {
            **{name: importlib.metadata.version(name) for name in LIBRARIES},
            "cuda": torch.version.cuda,
        },
        "sizes": {
            name: dict(zip(("blocks", "width", "inner", "heads", "batch"), size, strict=True))
            for name, size in SIZES.items()
        },
        "milliseconds": found,
    }
    for size in SIZES:
        for name, policy in RECIPES.items():
            if options.only not in f"{size}, {name}":
                continue
            own = found.setdefault(size, {}).setdefault(name, {})
            for how in ("eager",) if name == "te delayed" else ("eager", "compiled"):
                try:
                    own[how] = milliseconds(size, policy, how == "compiled")
                except Exception as error:  # any error of a library is a result
                    own[how] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                print(size, name, how, own[how], flush=True)
                torch._dynamo.reset()
                gc.collect()
                torch.cuda.empty_cache()
                options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
