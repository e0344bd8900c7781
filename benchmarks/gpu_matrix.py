"""Train each strategy with each framework and recipe on a real GPU: proven by its kernels, or refused before training.

    python benchmarks/gpu_matrix.py --output benchmarks/results/gpu_matrix.json            one GPU
    python benchmarks/gpu_matrix.py --output ... --gpus 2 --merge OLD.json                  two GPUs, and the variants
    python benchmarks/gpu_matrix.py --page                                                  writes the pages

A cell writes an mp.yaml with `mpguard init`, and launches a program of gpu_programs/ with it, which trains 103 steps.
A cell is proven if the verdict of the proof is "in force", every parameter has changed, master weights and reduction
are FP32, the kernels of the last steps are FP8 where they should be, and the loss is that of the BF16 run. It can be
run in parts: --only runs some cells (with the BF16 runs that they are compared with), --merge keeps those of an
earlier file. Needs a Hopper GPU, accelerate, transformers, DeepSpeed, Transformer Engine and torchao.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib.metadata
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS, RESULT = ROOT / "benchmarks/gpu_programs", ROOT / "benchmarks/results/gpu_matrix.json"
PAGE, TABLES = ROOT / "docs/gpu.md", ROOT / "docs/gpu_tables.md"
LIBRARIES = ("torch", "accelerate", "transformers", "deepspeed", "torchao", "transformer-engine", "mpguard")

FRAMEWORKS = {"accelerate": "accelerated.py", "own loop": "loop.py", "Trainer": "trainer.py"}
STRATEGIES = {
    "plain": "single", "DDP": "ddp", "FSDP1": "fsdp1", "FSDP2": "fsdp2",
    "ZeRO-1": "deepspeed-zero1", "ZeRO-2": "deepspeed-zero2", "ZeRO-3": "deepspeed-zero3",
}  # fmt: skip

#: Names of recipes, with their backend and fields of the policy over bf16_mixed (fp16_mixed).
RECIPES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "bf16": (None, {}),
    "fp16": (None, {"initial_loss_scale": 65536.0, "grad_reduce_in_fp32": True}),
    "delayed": ("te", {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16,
                       "fp8_amax_compute_algo": "max"}),
    "current": ("te", {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "block": ("te", {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
    "delayed, FP8 parameters": ("te", {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16,
                                       "fp8_amax_compute_algo": "max", "fp8_param": True}),
    "current, FP8 parameters": ("te", {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True}),
    "block, FP8 parameters": ("te", {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}),
    "tensorwise": ("torchao", {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "tensorwise, float8 all-gather": ("torchao", {"fp8": "hybrid", "fp8_recipe": "tensorwise",
                                                  "fp8_param_gather": True}),
    "rowwise": ("torchao", {"fp8": "e4m3", "fp8_recipe": "rowwise"}),
    "rowwise_with_gw_hp": ("torchao", {"fp8": "e4m3", "fp8_recipe": "rowwise_with_gw_hp"}),
    "current, compiled": ("te", {"fp8": "hybrid", "fp8_recipe": "tensorwise", "compile": True}),
    "tensorwise, compiled": ("torchao", {"fp8": "hybrid", "fp8_recipe": "tensorwise", "compile": True}),
    "MXFP8": ("te", {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    "NVFP4": ("te", {"fp4": "e2m1"}),
}  # fmt: skip

#: Variants of the programs, run on two GPUs, with the options of the program that make them.
VARIANTS = {
    "": (), "checkpointing": ("--checkpointing", "plain"), "reentrant checkpointing": ("--checkpointing", "reentrant"),
    "LoRA": ("--lora",), "accumulation of 4": ("--accumulation", "4"),
}  # fmt: skip

#: The recipes that the variants, the Trainer and own loops run with on two GPUs, and the variants' strategies.
VARIED = ("bf16", "delayed", "tensorwise")
VARIED_STRATEGIES = ("FSDP1", "FSDP2", "ZeRO-3")

#: The converted layers (7 of each of 4 blocks), and how many of a layer's three products are FP8 where not all are.
LAYERS, FP8_OF_3 = 28, {"rowwise_with_gw_hp": 2}

#: The largest mean relative difference from the BF16 loss, over the last 20 of the 100 steps.
GAPS, GAP, COMPARED = {"delayed": 0.02, "delayed, FP8 parameters": 0.02}, 0.01, slice(80, 100)


@dataclasses.dataclass(frozen=True)
class Cell:
    framework: str
    strategy: str
    recipe: str
    gpus: int = 1
    variant: str = ""

    @property
    def backend(self) -> str | None:
        return RECIPES[self.recipe][0]

    @property
    def kept(self) -> bool:
        """True if parameters are kept in FP8, so that the optimizer must hold master weights."""
        return "FP8 parameters" in self.recipe

    @property
    def name(self) -> str:
        gpus = f", {self.gpus} GPUs" if self.gpus > 1 else ""
        recipe = f"{self.backend} {self.recipe}" if self.backend else self.recipe
        return f"{self.framework}, {self.strategy}{gpus}, {recipe}{', ' if self.variant else ''}{self.variant}"

    @property
    def base(self) -> Cell:
        """Return the BF16 run that it is compared with."""
        return dataclasses.replace(self, recipe="bf16")

    def overrides(self, emulate: bool = False) -> dict[str, Any]:
        backend, fields = RECIPES[self.recipe]
        more = {"backend": backend} if backend else {}
        return {"compile": False, **fields, **more, **({"fp8_emulate": True} if emulate else {})}


def cells(gpus: int) -> list[Cell]:
    """Return the cells for a number of GPUs.

    On two: DDP, which accelerate and the Trainer do not use for one process; every recipe under each engine that
    shards, with accelerate; three recipes with the Trainer and with a loop without a framework; and the variants. On
    one: all others.
    """
    every = [
        Cell(framework, strategy, recipe, gpus)
        for recipe in RECIPES
        for framework in FRAMEWORKS
        for strategy in STRATEGIES
        if "all-gather" not in recipe or strategy == "FSDP2"
    ]
    if gpus == 1:
        return [cell for cell in every if cell.strategy != "DDP"]
    plain = [
        cell
        for cell in every
        if cell.strategy == "DDP"
        or (cell.strategy != "plain" and (cell.framework == "accelerate" or cell.recipe in VARIED))
    ]
    varied = [
        Cell("accelerate", strategy, recipe, gpus, variant)
        for recipe in VARIED
        for strategy in VARIED_STRATEGIES
        for variant in VARIANTS
        if variant and (strategy, variant) != ("FSDP1", "accumulation of 4")  # refused: it adds up in the compute dtype
    ]
    return [*plain, *varied]


#: `mpguard init` prints to stdout, which all threads share.
PREPARING = threading.Lock()

# -- running ---------------------------------------------------------------------------------------------------------


def prepared(cell: Cell, folder: Path, port: int) -> list[str]:
    """Write the files of a cell, and return the command that launches it."""
    from mpguard.cli import main as mpguard
    from mpguard.policy.policy import Policy

    emulate, device = _on_cpu(cell)
    config = folder / "mp.yaml"
    recipe, strategy = ("fp16_mixed" if cell.recipe == "fp16" else "bf16_mixed"), STRATEGIES[cell.strategy]
    words = ["init", recipe, "--strategy", strategy, "--num-processes", str(cell.gpus), "-o", str(config)]
    with PREPARING, contextlib.redirect_stdout(io.StringIO()):
        if mpguard([*words, "--device", device]) != 0:
            raise RuntimeError(f"mpguard init {recipe} --strategy {strategy} failed")
    overrides = json.dumps(cell.overrides(emulate))
    Policy(
        bf16=True, **(cell.overrides(emulate) if cell.recipe != "fp16" else {})
    )  # an error here is not one of the cell
    text = config.read_text().replace(
        f"mpguard_recipe: {recipe}\n", f"mpguard_recipe: {recipe}\n  mpguard_overrides: {overrides}\n"
    )
    config.write_text(text + f"main_process_port: {port}\n")
    second = folder / "ds_config.json"
    if second.exists():
        second.write_text(
            second.read_text().replace('"train_micro_batch_size_per_gpu": 1', '"train_micro_batch_size_per_gpu": 8')
        )
    program = [str(PROGRAMS / FRAMEWORKS[cell.framework]), "--out", str(folder / "facts.json")]
    program += ["--masters"] if cell.kept else []
    program += VARIANTS[cell.variant]
    own = ["--config", str(config), "--proof-json", str(folder / "proof.json")]
    if cell.framework == "own loop":
        run = [
            "torch.distributed.run",
            "--nproc_per_node",
            str(cell.gpus),
            "--master_port",
            str(port),
            "-m",
            "mpguard.run",
        ]
        program += ["--strategy", strategy]
    else:
        run = ["mpguard", "launch"]
    return [sys.executable, "-m", *run, *own, *program]


def _on_cpu(cell: Cell) -> tuple[bool, str]:
    """Return the cells for a trial of this script without a GPU: torchao in software."""
    import torch

    if torch.cuda.is_available():
        return False, "gpu"
    return cell.backend == "torchao", "cpu" if STRATEGIES[cell.strategy] in ("single", "ddp") else "gpu"


def run(cell: Cell, number: int, timeout: float) -> dict[str, Any]:
    """Run a cell, and return what the program wrote, the proof, the exit status and the output."""
    import torch

    devices = max(1, torch.cuda.device_count())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = prepared(cell, folder, 20000 + 7 * number)
        visible = ",".join(str((number + each) % devices) for each in range(cell.gpus))
        more = {"CUDA_VISIBLE_DEVICES": visible} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
        environment = {**os.environ, **more, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with (folder / "output").open("w+") as out:
            child = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=folder, env=environment, start_new_session=True
            )
            try:
                status: int | None = child.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(child.pid, signal.SIGKILL)
        facts, proof = (
            (json.loads(path.read_text()) if (path := folder / each).exists() else {})
            for each in ("facts.json", "proof.json")
        )
        output = (folder / "output").read_text(errors="replace")
    return {
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "facts": facts,
        "proof": proof,
        "output": output,
    }


def judged(cell: Cell, found: dict[str, Any], base: list[float] | None) -> dict[str, Any]:
    """Return the cell for the result file: proven, refused (before training, with its reason), or failed."""
    facts, proof, output = found["facts"], found["proof"], found["output"].splitlines()
    line = next((each for each in output if each.startswith("mpguard: ") and "Linear layers in FP8" not in each), None)
    result: dict[str, Any] = {
        **dataclasses.asdict(cell), "backend": cell.backend, "device": device_name(), "state": "failed", "reason": None,
        "fp8_share": None, "unchanged_parameters": None, "loss": None, "loss_bf16": None, "seconds": found["seconds"],
    }  # fmt: skip
    if found["status"] in (1, 2) and line and not facts:
        return result | {
            "state": "refused",
            "reason": line.removeprefix("mpguard: ").removesuffix("  (use --enforce warn to continue)"),
        }
    if found["status"] != 0 or not facts.get("finished"):
        return result | {"reason": f"status {found['status']}: {line or ''}", "output": output[-25:]}
    losses = facts["losses"][COMPARED]
    result |= {
        "fp8_share": facts["fp8_share"] and round(facts["fp8_share"], 4),
        "unchanged_parameters": len(facts["unchanged"]), "parameters": facts["parameters"],
        "loss": round(sum(losses) / len(losses), 4), "losses": [round(each, 4) for each in losses],
        "fp8_kernels_per_step": round(facts["fp8_kernels_per_step"], 1),
        "kernels_per_step": round(facts["kernels_per_step"], 1),
        "kernels": [each[:100] for each in facts["kernels"]],
    }  # fmt: skip
    wrong = list(shortfalls(cell, facts, proof))
    if base is None:
        wrong.append("there is no BF16 run to compare it to")
    else:
        gap = sum(abs(own - other) / other for own, other in zip(losses, base, strict=True)) / len(losses)
        result |= {"loss_bf16": round(sum(base) / len(base), 4), "gap": round(gap, 5)}
        if not gap <= (most := GAPS.get(cell.recipe, GAP)):
            wrong.append(f"the loss is {100 * gap:.2f} % from the BF16 run's, more than {100 * most:g} %")
    if wrong:
        return result | {"reason": "; ".join(wrong), "output": output[-25:]}
    return result | {"state": "proven"}


def shortfalls(cell: Cell, facts: dict[str, Any], proof: dict[str, Any]) -> list[str]:
    """Return which conditions a completed training does not meet."""
    wrong: list[str] = []
    rows = {row["name"]: row for row in proof.get("rows", ())}
    if proof.get("verdict") != "in force":
        wrong.append(f"the proof says {proof.get('verdict')}")
    if (engine := (proof.get("observed") or {}).get("engine")) != STRATEGIES[cell.strategy]:
        wrong.append(f"the engine is {engine}")
    if not rows.get("optimizer", {}).get("ok") or "weights fp32" not in rows["optimizer"]["found"]:
        wrong.append("the master weights are not FP32")
    if not rows.get("gradients", {}).get("found", "").startswith("fp32") or facts["reduced_in"] != "float32":
        wrong.append(f"gradients are reduced in {facts['reduced_in']}")
    if cell.gpus > 1 and not rows.get("reduction", {}).get("ok"):
        wrong.append("the reduction was not seen to be in FP32")
    if facts["unchanged"]:
        wrong.append(f"unchanged after training: {', '.join(facts['unchanged'][:3])}")
    if not facts["losses"][99] < 0.5 * facts["losses"][0]:
        wrong.append(f"the loss did not fall: {facts['losses'][0]:.3f} to {facts['losses'][99]:.3f}")
    products, fp8 = facts["kernels_per_step"], facts["fp8_kernels_per_step"]
    # A frozen weight has no gradient: LoRA's base layers have two products.
    expected = LAYERS * min(FP8_OF_3.get(cell.recipe, 3), 2 if cell.variant == "LoRA" else 3) if cell.backend else 0
    if products < 2 * LAYERS:
        wrong.append(f"only {products:g} matrix kernels a step were seen")
    if (fp8 < expected) if expected else fp8:
        wrong.append(f"{fp8:g} matrix kernels a step are FP8, not {expected}")
    if "all-gather" in cell.recipe and facts["gathered_in_fp8"] != LAYERS:
        wrong.append(f"{facts['gathered_in_fp8']} of {LAYERS} weights are all-gathered in FP8")
    if cell.kept and (facts["kept_in_fp8"] != LAYERS or not rows.get("fp8 weights", {}).get("ok")):
        wrong.append(f"{facts['kept_in_fp8']} of {LAYERS} weights are kept in FP8, with exact masters")
    if cell.recipe.startswith("delayed") and cell.gpus > 1 and facts["scales_agree"] is not True:
        wrong.append("the scales of delayed scaling are not the same on all ranks")
    if cell.backend and not rows.get("fp8", {}).get("ok"):
        wrong.append("the proof has no FP8 recipe in force")
    return wrong


class Matrix:
    """Run cells in parallel, the BF16 runs first, and write the file after each."""

    def __init__(self, output: Path, kept: list[dict[str, Any]], jobs: int, budget: float) -> None:
        self.output, self.jobs, self.lock = output, jobs, threading.Lock()
        self.deadline = time.monotonic() + budget
        self.results = {_key(each): each for each in kept}
        self.raw: dict[Cell, dict[str, Any]] = {}

    def run(self, wanted: list[Cell]) -> list[Cell]:
        """Return the cells for which no time was left."""
        left: list[Cell] = []

        def one(number: int, cell: Cell) -> None:
            remaining = self.deadline - time.monotonic()
            if remaining < 20:
                left.append(cell)
                return
            try:
                found = run(cell, number, min(remaining, 200))
            except Exception as error:
                found = {
                    "status": None,
                    "seconds": 0,
                    "facts": {},
                    "proof": {},
                    "output": f"mpguard: {type(error).__name__}: {error}",
                }
            if found["status"] is None and time.monotonic() > self.deadline:  # killed, and not by its own limit
                left.append(cell)
                return
            with self.lock:
                self.raw[cell] = found
                self._judge(cell)
                for other in self.raw:
                    if other != cell and other.base == cell:
                        self._judge(other)
                result = self.results[_key(dataclasses.asdict(cell))]
                write(self.output, list(self.results.values()))
                print(f"{result['state']:8} {cell.name} ({found['seconds']} s) {result['reason'] or ''}", flush=True)

        # Processes that wait for each other block a GPU, so only a few of those run at a time.
        small = [each for each in enumerate(wanted) if each[1].gpus == 1]
        large = [each for each in enumerate(wanted) if each[1].gpus > 1]
        workers = max(1, self.jobs // 6) if large else 0
        with (
            concurrent.futures.ThreadPoolExecutor(max(1, self.jobs - 2 * workers)) as pool,
            concurrent.futures.ThreadPoolExecutor(max(1, workers)) as pairs,
        ):
            done = [pool.submit(one, *each) for each in small] + [pairs.submit(one, *each) for each in large]
            for each in done:
                each.result()
        return left

    def _judge(self, cell: Cell) -> None:
        base = self.results.get(_key(dataclasses.asdict(cell.base)), {}).get("losses")
        if cell.recipe == "bf16":
            base = (self.raw[cell]["facts"].get("losses") or [])[COMPARED] or None
        self.results[_key(dataclasses.asdict(cell))] = judged(cell, self.raw[cell], base)


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["gpus"], cell["framework"], cell["strategy"], cell["recipe"], cell.get("variant", "")


def unmeasured(found: list[dict[str, Any]]) -> list[Cell]:
    """Return the cells that results do not have."""
    known = {_key(cell) for cell in found}
    return [cell for cell in [*cells(1), *cells(2)] if _key(dataclasses.asdict(cell)) not in known]


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def write(output: Path, found: list[dict[str, Any]]) -> None:
    import torch

    versions: dict[str, str | None] = {}
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    order = {_key(dataclasses.asdict(cell)): place for place, cell in enumerate([*cells(1), *cells(2)])}
    facts = {
        "versions": {**versions, "cuda": torch.version.cuda},
        "hardware": " and ".join(sorted({cell["device"] for cell in found})),
        "date": datetime.date.today().isoformat(),
        "unmeasured": [cell.name for cell in unmeasured(found)],
        "cells": sorted(found, key=lambda cell: order[_key(cell)]),
    }
    lines = ",\n".join(json.dumps(cell) for cell in facts.pop("cells"))
    head = json.dumps(facts, indent=1).removesuffix("\n}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(f'{head},\n "cells": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--merge", type=Path, action="append", default=[], help="results whose cells are kept")
    parser.add_argument("--missing", action="store_true", help="only the cells that no merged result has")
    parser.add_argument("--only", action="append", default=[], help="cells whose name has this in it; * is any text")
    parser.add_argument("--gpus", type=int, choices=(1, 2), action="append", help="the cells on so many GPUs")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--budget", type=float, default=3600, help="seconds, after which no cell is begun")
    parser.add_argument("--page", action="store_true", help="write docs/gpu.md and docs/gpu_tables.md from the result")
    options = parser.parse_args()
    if options.page:
        from gpu_page import page, tables

        result = json.loads(options.output.read_text("utf-8"))
        PAGE.write_text(page(result), encoding="utf-8")
        TABLES.write_text(tables(result), encoding="utf-8")
        return 0
    sys.path[:0] = [str(ROOT)]
    kept = [cell for path in options.merge for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    wanted = [cell for gpus in options.gpus or [1] for cell in cells(gpus)]
    if options.only:
        chosen = [cell for cell in wanted if any(fnmatch(cell.name, f"*{only}*") for only in options.only)]
        done = {_key(each) for each in kept if each.get("losses")}
        bases = [cell.base for cell in chosen if _key(dataclasses.asdict(cell.base)) not in done]
        wanted = [cell for cell in wanted if cell in chosen or cell in bases]
    if options.missing:
        gaps = unmeasured(kept)
        wanted = [cell for cell in wanted if cell in gaps]
    matrix = Matrix(options.output, kept, options.jobs, options.budget)
    left = matrix.run(wanted)
    for cell in left:
        print(f"no time was left for {cell.name}")
    bad = [cell for cell in matrix.results.values() if cell["state"] == "failed"]
    for result in bad:
        cell = Cell(*(result[key] for key in ("framework", "strategy", "recipe", "gpus", "variant")))
        print(f"\nFAILED {cell.name}: {result['reason']}")
        print("\n".join(result.pop("output", [])))
    states = Counter(cell["state"] for cell in matrix.results.values())
    print(f"{states['proven']} proven, {states['refused']} refused, {states['failed']} failed")
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
