"""How fast FP8 and the opt-ins make an unmodified LlamaForCausalLM, against the same script with torch.compile alone.

    python benchmarks/fp8.py --output benchmarks/results/fp8.json      # one Hopper GPU, under 6 minutes
    python benchmarks/fp8.py --quick                                   # tries the program itself on a CPU

Each variant trains in a process of its own: FP32 weights from a config, BF16 autocast, fused AdamW, random tokens. The
`stock` process of a size stays alive, and each variant takes turns with it, so that a busy neighbour hits both; the
ratio is that of the medians of these rounds. `ms` is the time of a step with a synchronization after it, `flow` without
one, `gpu` the kernels of one step by kind. The process of the next variant imports its libraries meanwhile.

All four blocks of width 4096 are in FP8, because they stand for the many of a deep model: the recipe's first and last
blocks in BF16 are left out. `auto` is what it is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "transformers", "torchao", "transformer-engine", "triton", "mpguard")

#: Name -> hidden size, FFN, heads, key and value heads, blocks, batch, tokens, vocabulary.
SIZES = {
    "4 x 8B, 2x4096": (4096, 14336, 32, 8, 4, 2, 4096, 32000),
    "8 x 2048, 1x2048": (2048, 8192, 32, 8, 8, 1, 2048, 32000),
    "12 x 768, 16x1024": (768, 3072, 12, 12, 12, 16, 1024, 32000),
    "tiny": (64, 128, 4, 2, 2, 2, 32, 256),
}

FP8 = "bf16_with_fp8_current_scaling_mixed"
TORCHAO = {"backend": "torchao"}
HEAD = {**TORCHAO, "fp8_head": True, "fp8_fast_accum": True}


@dataclasses.dataclass(frozen=True)
class Variant:
    """recipe: None without mpguard. changes: of its fields. compiled: the script compiles. by_hand: converts to FP8."""

    recipe: str | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compiled: bool = True
    by_hand: bool = False


VARIANTS = {
    "stock": Variant(),
    "bf16": Variant("bf16_mixed"),
    "fp8": Variant(FP8),
    "fp8, te": Variant(FP8, {"backend": "te"}),
    "fp8, torchao by hand": Variant("bf16_mixed", by_hand=True),
    "fp8, head, fast": Variant(FP8, HEAD),
    "fp8, head, fast, masters": Variant(FP8, {**HEAD, "master_weights": "optimizer"}),
    "bf16, masters": Variant("bf16_mixed", {"master_weights": "optimizer"}),
    "fp8, not compiled by the script": Variant(FP8, compiled=False),
    "auto": Variant("auto"),
}

#: What is measured, the most telling first.
PLAN = (
    ("4 x 8B, 2x4096", "bf16"),
    ("4 x 8B, 2x4096", "fp8"),
    ("4 x 8B, 2x4096", "fp8, head, fast"),
    ("4 x 8B, 2x4096", "fp8, head, fast, masters"),
    ("4 x 8B, 2x4096", "fp8, torchao by hand"),
    ("4 x 8B, 2x4096", "bf16, masters"),
    ("8 x 2048, 1x2048", "auto"),
    ("8 x 2048, 1x2048", "bf16"),
    ("12 x 768, 16x1024", "auto"),
    ("12 x 768, 16x1024", "bf16"),
    ("4 x 8B, 2x4096", "fp8, not compiled by the script"),
    ("4 x 8B, 2x4096", "fp8, te"),
)
QUICK = (("tiny", "bf16"), ("tiny", "fp8, torchao by hand"), ("tiny", "fp8, head, fast, masters"))

#: The bounds that this table has to meet: (size, variant) -> ratio to stock.
BOUNDS = {
    ("4 x 8B, 2x4096", "bf16"): 1.15,
    ("4 x 8B, 2x4096", "fp8"): 1.45,
    ("4 x 8B, 2x4096", "fp8, not compiled by the script"): 1.45,
    ("4 x 8B, 2x4096", "fp8, head, fast"): 1.57,
    ("4 x 8B, 2x4096", "fp8, head, fast, masters"): 1.63,
    ("8 x 2048, 1x2048", "auto"): 1.10,
    ("12 x 768, 16x1024", "auto"): 1.10,
}

#: Steps before the first round, and rounds and steps in each.
WARM_UP, ROUNDS, STEPS = 8, 3, 8

#: Kernels by kind; cuBLAS's names have q for E4M3 and r for E5M2.
FP8_KERNELS = r"e4m3|e5m2|nvjet_(sm90_)?[qr]{2}|fp8|float8|f8|scaled_mm"
KINDS = (
    ("optimizer", r"multi_tensor|adam"),
    ("rest", r"^triton_(?!tem)"),
    ("attention", r"flash|fmha|sdpa|attention|cudnn_generated"),
    ("products", r"gemm|nvjet|cutlass|triton_tem"),
    ("copy", r"^Mem(cpy|set)"),
)


# -- a worker: one variant of one size ---------------------------------------------------------------------------------


def policy_of(variant: Variant, device: str) -> Any:
    import mpguard

    assert variant.recipe is not None
    policy = mpguard.recipe(variant.recipe)
    changes = dict(variant.changes)
    if variant.recipe == FP8:
        changes["first_last_layers_bf16"] = False
    if policy.fp8 and device == "cpu":
        changes |= {"fp8_emulate": True, **TORCHAO}
    return policy.replace(**changes)


def convert_by_hand(model: Any, device: str) -> None:
    """Convert as torchao's documentation does: every Linear but the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=device == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)


def trainer(sizes: tuple[int, ...], variant: Variant, device: str) -> Callable[[], Any]:
    """Return a function that trains one step and returns the loss, not read yet."""
    if variant.recipe is not None:
        import mpguard

        # By hand, mpguard only keeps `is_causal`: the two variants differ in who converts.
        mpguard.activate(policy_of(variant, device), enforce="off" if variant.by_hand else "warn")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, ffn, heads, groups, blocks, batch, tokens, vocabulary = sizes
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=groups,
        num_hidden_layers=blocks, vocab_size=vocabulary, max_position_embeddings=tokens, use_cache=False,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).train()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, vocabulary, (batch, tokens), generator=generator).to(device) for _ in range(4)]
    if variant.by_hand:
        convert_by_hand(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    net = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager") if variant.compiled else model
    by_hand_on_cpu = variant.by_hand and device == "cpu"  # torchao reads only the state of CUDA's autocast
    number = 0

    def step() -> Any:
        nonlocal number
        ids, number = batches[number % 4], number + 1
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not by_hand_on_cpu):
            loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def work(sizes: tuple[int, ...], variant: Variant) -> None:
    """Train in this process: a round for each line on stdin, with its times as JSON on stdout. The first builds it."""
    import torch
    import transformers  # noqa: F401  while another variant is measured

    sys.stdin.readline()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    began = time.perf_counter()
    step = trainer(sizes, variant, device)
    first = float(step())
    compiled = time.perf_counter() - began
    loss = [float(step()) for _ in range(WARM_UP)][-1]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    say({"loss": [first, loss], "first_step_s": compiled, "device": name_of(device)})
    for line in sys.stdin:
        if line.strip() == "end":
            say({**memory(device), **kernels(step, synchronize, device), **proven(variant)})
            break
        ms = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            step()
            synchronize()
            ms.append((time.perf_counter() - begin) * 1e3)
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        host = (time.perf_counter() - begin) * 1e3 / STEPS
        synchronize()
        say({"ms": ms, "flow": (time.perf_counter() - begin) * 1e3 / STEPS, "host": host})
    sys.stdout.flush()
    os._exit(0)


def say(found: Mapping[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def name_of(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_name()) if device == "cuda" else device


def memory(device: str) -> dict[str, Any]:
    import torch

    return {"gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if device == "cuda" else {}


def kernels(step: Callable[[], Any], synchronize: Callable[[], None], device: str) -> dict[str, Any]:
    """Return the milliseconds of one step's kernels by kind."""
    if device != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    kinds: dict[str, float] = {}
    with contextlib.suppress(Exception):
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step()
            synchronize()
        for event in trace.key_averages():
            spent = event.self_device_time_total / 1e3
            if not spent or event.key.startswith(("cuda", "Lazy", "Activity")):
                continue
            kind = next((name for name, pattern in KINDS if re.search(pattern, event.key, re.IGNORECASE)), "rest")
            if kind == "products" and re.search(FP8_KERNELS, event.key, re.IGNORECASE):
                kind = "products in fp8"
            kinds[kind] = round(kinds.get(kind, 0.0) + spent, 2)
    return {"gpu": kinds}


def proven(variant: Variant) -> dict[str, Any]:
    """Return the verdict of mpguard's proof, and the rows about FP8."""
    if variant.recipe is None or variant.by_hand:
        return {}
    from mpguard.runtime.guard import current

    guard = current()
    proof = guard.proof if guard is not None else None
    if guard is None or proof is None:
        return {"proof": "none"}
    wanted = ("fp8", "fp8 products", "fp8 head", "parameters", "compile", "attention mask")
    rows = {row.name: row.found for row in proof.rows if row.name in wanted}
    return {"proof": proof.verdict, "failures": list(proof.failures), "rows": rows, "recipe": guard.plan.policy.name}


# -- the parent --------------------------------------------------------------------------------------------------------


class Worker:
    """The process of one variant of one size. It begins when it is asked for the first time."""

    def __init__(self, size: str, variant: str) -> None:
        path = os.pathsep.join((str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")))
        self.name = f"{size}, {variant}"
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.text: list[str] = []
        self.started = False
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--work", variant, "--size", size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"},
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            (self.lines.put(line) if line.startswith("{") else self.text.append(line))
        self.lines.put(None)

    def ask(self, word: str = "", timeout: float = 150.0) -> dict[str, Any]:
        """Return the next answer. Raises `RuntimeError` if the process has ended, or is too slow."""
        assert self.process.stdin is not None
        try:
            print(word, file=self.process.stdin, flush=True)
            line = self.lines.get(timeout=timeout)
        except (OSError, queue.Empty):
            line = None
        if line is None:
            state = self.process.poll()
            how = f"no answer in {timeout:.0f} s" if state is None else f"ended with status {state}"
            self.end()
            raise RuntimeError(f"{self.name}: {how}: {''.join(self.text)[-1500:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclasses.dataclass
class Times:
    ms: list[float] = dataclasses.field(default_factory=list)
    flow: list[float] = dataclasses.field(default_factory=list)
    host: list[float] = dataclasses.field(default_factory=list)

    def add(self, found: Mapping[str, Any]) -> None:
        self.ms += found["ms"]
        self.flow.append(found["flow"])
        self.host.append(found["host"])

    def row(self) -> dict[str, float]:
        return {
            "ms": statistics.median(self.ms),
            "lo": min(self.ms),
            "hi": max(self.ms),
            "flow": statistics.median(self.flow),
            "host": statistics.median(self.host),
        }


def pair(stock: Worker, worker: Worker) -> dict[str, Any]:
    """Return the row of a variant: rounds in turn with those of `stock`."""
    began = worker.ask()
    own, base = Times(), Times()
    for _ in range(ROUNDS):
        base.add(stock.ask())
        own.add(worker.ask())
    row = {**began, **own.row(), "stock_ms": statistics.median(base.ms), "stock_flow": statistics.median(base.flow)}
    row["ratio"] = round(row["stock_ms"] / row["ms"], 3)
    row["flow_ratio"] = round(row["stock_flow"] / row["flow"], 3)
    return {**row, **worker.ask("end", 60.0)}


def measure(plan: tuple[tuple[str, str], ...], deadline: float) -> list[dict[str, Any]]:
    """Return a row per variant. Nothing is begun after the deadline, in seconds."""
    began, rows = time.monotonic(), []
    sizes = list(dict.fromkeys(size for size, _ in plan))
    plan = tuple(each for size in sizes for each in plan if each[0] == size)
    stock: Worker | None = None
    ahead: Worker | None = None
    try:
        for place, (size, variant) in enumerate(plan):
            row: dict[str, Any] = {"size": size, "variant": variant}
            rows.append(row)
            if time.monotonic() - began > deadline:
                row["state"] = "no time"
                continue
            worker, ahead = ahead or Worker(size, variant), None
            try:
                if stock is None or not stock.name.startswith(f"{size},"):
                    if stock is not None:
                        stock.end()
                    stock = Worker(size, "stock")
                    first = stock.ask()
                    rows.insert(len(rows) - 1, {"size": size, "variant": "stock", **first})
                if place + 1 < len(plan):
                    ahead = Worker(*plan[place + 1])
                row.update(pair(stock, worker))
            except RuntimeError as error:
                row["state"] = f"failed: {error}"
                if stock is not None and stock.process.poll() is not None:
                    stock = None
            worker.end()
            print(text_of(row), flush=True)
    finally:
        for each in (stock, ahead):
            if each is not None:
                each.end()
    return rows


def text_of(row: Mapping[str, Any]) -> str:
    name = f"{row['size']:18} {row['variant']:32}"
    if "ratio" not in row:
        return f"{name} {row['state']}"
    bound = BOUNDS.get((row["size"], row["variant"]))
    verdict = "" if bound is None else f" (bound {bound}: {'met' if row['ratio'] >= bound else 'MISSED'})"
    gpu = " ".join(f"{kind} {ms}" for kind, ms in row.get("gpu", {}).items())
    times = f"{row['ms']:7.1f} ms ({row['lo']:.1f} to {row['hi']:.1f}), stock {row['stock_ms']:.1f}"
    more = f"flow x{row['flow_ratio']:.3f}, host {row['host']:.1f} ms, {row.get('gib', 0)} GiB"
    ran = f"loss {row['loss'][1]:.4f}, first step {row['first_step_s']:.0f} s, {row.get('proof', 'no proof')}"
    facts = "; ".join([gpu, *(f"{key}: {found}" for key, found in row.get("rows", {}).items())])
    failures = "".join(f"\n    {each}" for each in row.get("failures", ()))
    return f"{name} {times}: x{row['ratio']:.3f}{verdict}, {more}, {ran}\n    {facts}{failures}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file for the result")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries the program, measures nothing")
    parser.add_argument("--only", default="", help="variants with this in `SIZE, VARIANT`")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds after which no variant is begun")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(SIZES[options.size], VARIANTS[options.work])
        return 0
    began = time.monotonic()
    plan = tuple(each for each in (QUICK if options.quick else PLAN) if options.only in ", ".join(each))
    rows = measure(plan, options.deadline)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": next((row["device"] for row in rows if "device" in row), None),
        "versions": {name: version(name) for name in LIBRARIES},
        "sizes": {name: SIZES[name] for name in dict.fromkeys(row["size"] for row in rows)},
        "bounds": {", ".join(key): bound for key, bound in BOUNDS.items()},
        "steps": {"warm_up": WARM_UP, "rounds": ROUNDS, "in_each": STEPS},
        "seconds": round(time.monotonic() - began),
        "rows": [{key: value for key, value in row.items() if key != "device"} for row in rows],
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all("ratio" in row or row["variant"] == "stock" for row in rows) else 1


def version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


if __name__ == "__main__":
    sys.exit(main())
