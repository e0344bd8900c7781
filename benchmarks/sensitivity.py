"""Is the ranking of `mpguard sensitivity` right, and what does measuring cost?

    python benchmarks/sensitivity.py ranking --output benchmarks/results/sensitivity.json    an hour of one core
    python benchmarks/sensitivity.py cost [--width 1024] [--blocks 8] [--tokens 4096]

**ranking.** Small models are trained with the products of all Linear layers rounded to NVFP4
(`mpguard.nn.number_formats`, forward and backward), and in FP32, with the same weights, batches and order: the
difference of their last losses is the gap. A gap that is not 3 standard errors above zero, over the seeds of a model,
says nothing, and is not ranked. Else the layers are ranked by `mpguard.sensitivity` in the first steps of the FP32 run,
and the model is trained again with the top k layers out of NVFP4, and with k random ones (the mean of two draws). The
sign test counts the pairs, over models and seeds, in which the top k have closed more of the gap.

Two kinds of models: `plain`, as they are initialized, and `outliers`, in which k layers get inputs of which a few
features are 1,000 times larger, and weights that are as much smaller: what training does to large transformers. Without
rounding both compute the same.

**cost.** The time of a step that measures, and the memory, against one that does not, in the same run; on a GPU if
there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt import corpus

import mpguard
from mpguard.core.version import __version__
from mpguard.nn.number_formats import FORMATS, rounded
from mpguard.numerics.probe import Probe, ProbeSettings

FORMAT = "nvfp4"
CONTEXT, BATCH, VOCABULARY, BLOCKS = 32, 8, 256, 3
FACTOR, FEATURES = 1000.0, 4

#: A gap of fewer standard errors is none.
ERRORS = 3.0


class _Rounded(torch.autograd.Function):
    """A Linear layer whose three products have operands in `FORMAT`, each rounded along what it sums over."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.shape = inputs.shape
        found = rounded(rows, FORMAT).values @ rounded(weight, FORMAT, "weight").values.t()
        return found.view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        own = gradient.reshape(-1, gradient.shape[-1])
        of_input = rounded(own, FORMAT, "gradient").values @ rounded(weight.t(), FORMAT, "weight").values.t()
        of_weight = rounded(own.t(), FORMAT, "gradient").values @ rounded(rows.t(), FORMAT).values.t()
        return of_input.view(ctx.shape), of_weight


def round_layers(model: nn.Module, names: set[str]) -> None:
    """Let some layers of a model compute in `FORMAT`."""
    for name, module in model.named_modules():
        if name in names:

            def forward(inputs: torch.Tensor, own: Any = module) -> torch.Tensor:
                found: torch.Tensor = _Rounded.apply(inputs, own.weight)
                return found if own.bias is None else found + own.bias

            module.forward = forward  # type: ignore[method-assign]


# -- models -----------------------------------------------------------------------------------------------------------


class Spread(nn.Module):
    """A Linear layer that gets larger inputs, and has smaller weights, at some features: the same function."""

    def __init__(self, layer: nn.Linear, factors: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors)
        self.layer = layer
        parametrize.register_parametrization(layer, "weight", _Divided(factors))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs * self.factors)
        return found


class _Divided(nn.Module):
    def __init__(self, factors: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / self.factors


class Attention(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(width, 3 * width), nn.Linear(width, width), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: torch.Tensor = self.out(found.transpose(1, 2).flatten(-2))
        return result


class Mlp(nn.Module):
    """gated: SwiGLU, as in LLaMA; else GELU, as in GPT-2."""

    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 4 * width) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        result: torch.Tensor = self.down(hidden)
        return result


class Block(nn.Module):
    """post: norms after the residuals, as in the first transformer."""

    def __init__(self, width: int, *, gated: bool = False, post: bool = False, causal: bool = True) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2, self.post = norm(width), norm(width), post
        self.attention, self.mlp = Attention(width, causal), Mlp(width, gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.post:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return]
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class ParallelBlock(nn.Module):
    """A block of PaLM: attention and a gated MLP of the same input, side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), Attention(width, causal=True), Mlp(width, gated=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.norm(x)
        return x + self.attention(own) + self.mlp(own)  # type: ignore[no-any-return]


class MixerBlock(nn.Module):
    """A block of MLP-Mixer: one MLP over the positions, one over the features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.positions, self.mlp = Mlp(CONTEXT, gated=False), Mlp(width, gated=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Predicts the next byte; with `masked` every fourth byte, which it does not see, from those around it."""

    def __init__(self, width: int, block: Callable[[], nn.Module], *, masked: bool = False) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks, self.masked = nn.ModuleList(block() for _ in range(BLOCKS)), masked
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the loss. window: (batch, CONTEXT + 1) bytes."""
        tokens, labels = window[:, :-1], window[:, 1:]
        if self.masked:
            tokens, labels = tokens.clone(), tokens[:, 2::4]
            tokens[:, 2::4] = 0
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        if self.masked:
            x = x[:, 2::4]
        return F.cross_entropy(self.head(self.norm(x)).reshape(-1, VOCABULARY), labels.reshape(-1))


MODELS: dict[str, Callable[[], Model]] = {
    "gpt": lambda: Model(64, lambda: Block(64)),
    "llama": lambda: Model(48, lambda: Block(48, gated=True)),
    "post": lambda: Model(64, lambda: Block(64, post=True)),
    "palm": lambda: Model(48, lambda: ParallelBlock(48)),
    "bert": lambda: Model(64, lambda: Block(64, causal=False), masked=True),
    "mixer": lambda: Model(64, lambda: MixerBlock(64), masked=True),
}


def built(name: str, seed: int, planted: Sequence[str]) -> Model:
    """Return a model with the weights of a seed, and outliers in some layers."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    for layer in planted:
        parent, _, own = layer.rpartition(".")
        module = getattr(model.get_submodule(parent), own)
        factors = torch.ones(module.in_features)
        factors[torch.randperm(module.in_features, generator=torch.Generator().manual_seed(seed))[:FEATURES]] = FACTOR
        setattr(model.get_submodule(parent), own, Spread(module, factors))
    return model


def layers_of(name: str) -> list[str]:
    """Return the Linear layers in the blocks of a model."""
    return [own for own, module in MODELS[name]().named_modules() if isinstance(module, nn.Linear) and own != "head"]


# -- the ranking ------------------------------------------------------------------------------------------------------


def batches(text: torch.Tensor, seed: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (steps, BATCH), generator=generator)
    return [torch.stack([text[start : start + CONTEXT + 1] for start in row.tolist()]) for row in starts]


def last_loss(model: Model, data: Sequence[torch.Tensor], rounded_layers: set[str]) -> float:
    """Train, and return the mean loss of the last quarter of the steps."""
    round_layers(model, rounded_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for batch in data:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.mean(losses[-len(losses) // 4 :])


def ranking(model: Model, data: Sequence[torch.Tensor]) -> list[str]:
    """Return the layers of a model, the one that loses most first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    report = mpguard.sensitivity(
        model, [(batch,) for batch in data], "fp32", optimizer=optimizer, steps=16, every=4, formats=[FORMAT]
    )
    found = sorted(report.measured, key=lambda layer: layer.snr(FORMAT) or 0.0)
    return [layer.name.removesuffix(".layer") for layer in found if layer.name != "head"]


def measured(name: str, kind: str, seed: int, text: torch.Tensor, steps: int) -> dict[str, Any]:
    """Return the losses of one model and seed."""
    every = layers_of(name)
    k = max(1, len(every) // 4)
    draw = random.Random(f"{name} {seed}")
    planted = draw.sample(every, k) if kind == "outliers" else []
    data = batches(text, seed, steps)

    def named(layers: Sequence[str]) -> set[str]:
        return {f"{own}.layer" if own in planted else own for own in layers}

    def loss_without(left_out: Sequence[str]) -> float:
        chosen = [own for own in every if own not in left_out]
        return last_loss(built(name, seed, planted), data, named(chosen))

    ranked = ranking(built(name, seed, planted), data[:20])
    draws = [draw.sample(every, k) for _ in range(2)]
    return {
        "model": name, "kind": kind, "seed": seed, "layers": len(every), "k": k, "planted": planted, "ranked": ranked,
        "exact": last_loss(built(name, seed, planted), data, set()),
        "all": loss_without([]),
        "top": loss_without(ranked[:k]),
        "random": [loss_without(each) for each in draws],
        "draws": draws,
    }  # fmt: skip


def sign_test(wins: int, count: int) -> float:
    """Return the chance of so many wins or more, if both were equally good."""
    return sum(math.comb(count, i) for i in range(wins, count + 1)) / 2**count


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each kind of models, which have a gap, and how often the top k have closed more of it."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        models: dict[str, Any] = {}
        wins = pairs = 0
        for name in dict.fromkeys(row["model"] for row in rows if row["kind"] == kind):
            own = [row for row in rows if row["kind"] == kind and row["model"] == name]
            gaps = [row["all"] - row["exact"] for row in own]
            error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
            has_gap = statistics.mean(gaps) >= ERRORS * error
            top = [row["all"] - row["top"] for row in own]
            drawn = [row["all"] - statistics.mean(row["random"]) for row in own]
            models[name] = {
                "gap": statistics.mean(gaps), "standard_error": error if len(own) > 1 else None, "ranked": has_gap,
                "closed_by_top": statistics.mean(top) / statistics.mean(gaps),
                "closed_by_random": statistics.mean(drawn) / statistics.mean(gaps),
                "wins": sum(a > b for a, b in zip(top, drawn, strict=True)), "seeds": len(own),
                "planted_in_top": sum(len(set(row["planted"]) & set(row["ranked"][: row["k"]])) for row in own),
                "planted": sum(len(row["planted"]) for row in own),
            }  # fmt: skip
            if has_gap:
                wins += models[name]["wins"]
                pairs += len(own)
        found[kind] = {"models": models, "wins": wins, "pairs": pairs, "p": sign_test(wins, pairs)}
    return found


def run_ranking(options: argparse.Namespace) -> None:
    text = corpus(1)
    rows: list[dict[str, Any]] = []
    if options.output is not None and options.output.exists():
        rows = json.loads(options.output.read_text())["rows"]
    known = {(row["kind"], row["model"], row["seed"]) for row in rows}
    for kind in options.kinds:
        for seed in range(options.seeds):
            for name in options.models:
                if (kind, name, seed) in known:
                    continue
                began = time.monotonic()
                rows.append(measured(name, kind, seed, text, options.steps))
                row = rows[-1]
                print(
                    f"{kind} {name} seed {seed}: exact {row['exact']:.4f}, all {row['all']:.4f}, top {row['top']:.4f}, "
                    f"random {statistics.mean(row['random']):.4f} ({time.monotonic() - began:.0f} s)",
                    flush=True,
                )
                if options.output is not None:
                    _write(options.output, rows, options)
    print(json.dumps(judged(rows), indent=2))


def _write(path: Path, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    result = {
        "mpguard": __version__, "torch": torch.__version__, "device": "CPU", "format": FORMAT, "steps": options.steps,
        "judged": judged(rows), "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n")


# -- the cost ---------------------------------------------------------------------------------------------------------


def run_cost(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(*(Block(width, gated=True) for _ in range(options.blocks))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lines: list[Any] = []
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed")
    probe = Probe(ProbeSettings(list(FORMATS), policy, steps=options.steps, every=options.every), lines.append)

    def step() -> float:
        _synchronize(device)
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(torch.randn(1, options.tokens, width, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(device)
        return 1000 * (time.perf_counter() - began)

    for _ in range(3):
        step()
    without = [step() for _ in range(options.steps)]
    memory = _peak(device)
    probe.find_layers()
    step()
    probe.step_ended(lambda: [model])
    measuring = []
    while not probe.finished:
        measuring.append(step())
        probe.step_ended(lambda: [model])
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU, 1 thread",
        "width": width, "blocks": options.blocks, "tokens": options.tokens, "every": options.every,
        "parameters": sum(own.numel() for own in model.parameters()),
        "ms": statistics.median(without), "ms_measuring": statistics.median(measuring),
        "times": statistics.median(measuring) / statistics.median(without),
        "peak_bytes": memory, "more_bytes": _peak(device) - memory,
    }  # fmt: skip
    print(json.dumps(found, indent=2))
    if options.output is not None:
        result = json.loads(options.output.read_text()) if options.output.exists() else {}
        options.output.write_text(json.dumps({**result, "cost": [*result.get("cost", []), found]}, indent=1) + "\n")


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(device: str) -> int:
    """Return the bytes that were in use at most: of tensors on a GPU, of the process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_ranking = commands.add_parser("ranking")
    of_ranking.add_argument("--seeds", type=int, default=5)
    of_ranking.add_argument("--steps", type=int, default=300)
    of_ranking.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    of_ranking.add_argument("--kinds", nargs="+", default=["outliers", "plain"])
    of_ranking.add_argument("--output", type=Path, help="rows that the file has are kept, and not run again")
    of_ranking.set_defaults(run=run_ranking)
    of_cost = commands.add_parser("cost")
    for name, default in (("width", 1024), ("blocks", 8), ("tokens", 4096), ("steps", 8), ("every", 4)):
        of_cost.add_argument(f"--{name}", type=int, default=default)
    of_cost.add_argument("--output", type=Path)
    of_cost.set_defaults(run=run_cost)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
