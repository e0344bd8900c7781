"""Real launches on a real GPU: what mpguard proves there, and what it refuses.

    python benchmarks/gpu_proofs.py --output benchmarks/results/gpu_proofs.json

Each cell writes an mp.yaml with `mpguard init`, launches a program of examples/ with it, and keeps the
proof. Needs one GPU that has FP8 (Hopper or newer), accelerate, torchao, DeepSpeed and Transformer Engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LIBRARIES = ("torch", "accelerate", "transformers", "deepspeed", "torchao", "transformer-engine", "mpguard")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One launch. expected: "proven", "refused" (by mpguard, before or after the first step)."""

    name: str
    recipe: str
    program: str
    strategy: str = "single"
    overrides: str = ""
    torchrun: bool = False
    expected: str = "proven"


#: Current scaling, first and last block in BF16; parameters kept in FP8 are not for single Linear layers.
_CURRENT, _NO_PARAM = "bf16_with_fp8_current_scaling_mixed", "{fp8_param_gather: false}"

CELLS = (
    Cell("plain torch, bf16", "bf16_mixed", "train_torch.py"),
    Cell("plain torch, fp16", "fp16_mixed", "train_torch.py"),
    Cell("accelerate, bf16", "bf16_mixed", "train_accelerate.py"),
    Cell("accelerate, fp16", "fp16_mixed", "train_accelerate.py"),
    Cell("Trainer, bf16", "bf16_mixed", "train_trainer.py"),
    Cell("FSDP2, bf16", "bf16_mixed", "train_fsdp2.py", "fsdp2", torchrun=True),
    Cell("DeepSpeed ZeRO-2, bf16", "bf16_mixed", "train_deepspeed.py", "deepspeed-zero2", torchrun=True),
    Cell("accelerate, torchao tensorwise", "hopper_bf16_with_fp8_mixed", "train_accelerate.py",
         overrides="{backend: torchao}"),
    Cell("accelerate, torchao rowwise", "bf16_with_fp8_rowwise_mixed", "train_accelerate.py"),
    Cell(
        "accelerate, torchao tensorwise, compiled", "hopper_bf16_with_fp8_mixed", "train_accelerate.py",
        overrides="{compile: true, backend: torchao}",
    ),
    Cell(
        "accelerate, TE delayed, lm_head in FP8 too", "bf16_with_fp8_delayed_scaling_mixed", "train_accelerate.py",
        overrides="{fp8_param_gather: false, fp8_exclude: []}",
    ),
    Cell(
        "accelerate, TE delayed, lm_head kept out", "bf16_with_fp8_delayed_scaling_mixed", "train_accelerate.py",
        overrides="{fp8_param_gather: false}",
    ),
    Cell("accelerate, TE current, ends in bf16", _CURRENT, "train_accelerate.py", overrides=_NO_PARAM),
    Cell("accelerate, bf16, compiled", "bf16_mixed", "train_accelerate.py", overrides="{compile: true}"),
    Cell("accelerate, MXFP8", "bf16_with_mxfp8_mixed", "train_accelerate.py", expected="refused"),
    Cell("plain torch, FP8: TE current, ends in bf16", _CURRENT, "train_torch.py", overrides=_NO_PARAM),
    Cell("Trainer, FP8: TE current, ends in bf16", _CURRENT, "train_trainer.py", overrides=_NO_PARAM),
    Cell("FSDP2, FP8: TE current, ends in bf16", _CURRENT, "train_fsdp2.py", "fsdp2", _NO_PARAM, torchrun=True),
    Cell("DeepSpeed ZeRO-2, FP8: TE current, ends in bf16", _CURRENT, "train_deepspeed.py", "deepspeed-zero2",
         _NO_PARAM, torchrun=True),
)  # fmt: skip


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    """One cell: its state, the proof, and, where that is not the expected one, the last lines of what it printed."""
    config, proof = folder / "mp.yaml", folder / "proof.json"
    python = [sys.executable, "-m"]
    init = [*python, "mpguard", "init", cell.recipe, "--strategy", cell.strategy, "--num-processes", "1"]
    made = subprocess.run([*init, "-o", str(config)], capture_output=True, text=True, cwd=folder)
    said = made.stdout + made.stderr
    status: int | None = made.returncode
    started = time.monotonic()
    if made.returncode == 0:
        if cell.overrides:
            text = config.read_text().replace(
                f"  mpguard_recipe: {cell.recipe}\n",
                f"  mpguard_recipe: {cell.recipe}\n  mpguard_overrides: {cell.overrides}\n",
            )
            config.write_text(text)
        program = [str(EXAMPLES / cell.program), "--steps", "20"]
        if cell.torchrun:
            own = ["mpguard.run", "--config", str(config), "--proof-json", str(proof)]
            command = [*python, "torch.distributed.run", "--nproc_per_node", "1", "-m", *own, *program]
        else:
            command = [*python, "mpguard", "launch", "--config", str(config), "--proof-json", str(proof), *program]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, env=os.environ)
        said, status = done.stdout + done.stderr, done.returncode
    verdict = json.loads(proof.read_text()) if proof.exists() else None
    refused = status in (1, 2) and any(line.startswith("mpguard:") for line in said.splitlines())
    state = "proven" if status == 0 and verdict and verdict.get("verdict") == "in force" else (
        "refused" if refused else "failed"
    )  # fmt: skip
    return {
        **dataclasses.asdict(cell),
        "state": state,
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "reason": next((line for line in said.splitlines() if line.startswith("mpguard:")), None),
        "proof": {key: value for key, value in (verdict or {}).items() if key != "config"},
        "said": [] if state == cell.expected else said.splitlines()[-25:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    options = parser.parse_args()

    import torch

    cells = []
    for cell in CELLS:
        if options.only not in cell.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = run(cell, Path(folder))
        good = result["state"] == cell.expected
        mark = "ok " if good else "BAD"
        print(f"{mark} {cell.name}: {result['state']} ({result['seconds']} s) {result['reason'] or ''}", flush=True)
        if not good:
            print("\n".join(result["said"]), flush=True)
        cells.append(result)
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = None
    facts = {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "cuda": torch.version.cuda,
        "versions": versions,
        "cells": cells,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0 if all(cell["state"] == cell["expected"] for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
