"""Write docs/gpu.md and docs/gpu_tables.md from the result files of gpu_matrix.py, parallel.py and compile_auto."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COMPILED = RESULTS / "compile_auto.json"
#: Title -> the result of parallel.py on so many GPUs.
PARALLEL = {"Four GPUs": RESULTS / "parallel.json", "Two GPUs": RESULTS / "parallel_two_gpus.json"}

#: The columns. DDP has two processes, since accelerate and the Trainer do not wrap a single one; the others have one.
STRATEGIES = ("plain", "DDP, 2 GPUs", "FSDP1", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")

#: The columns of the tables for two GPUs.
SHARDED = tuple(f"{name}, 2 GPUs" for name in ("FSDP1", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3"))


#: The section about parameters that are kept in FP8.
KEPT = (
    "## Parameters in FP8", "",
    "With `fp8_param` (`fp8_param_gather`) the weights of the converted layers are themselves FP8 tensors of "
    "Transformer Engine, rounded once per step instead of at each forward pass. Training needs the exact values: the "
    "optimizer must hold FP32 master weights, `transformer_engine.pytorch.optimizers.FusedAdam(model.parameters(), "
    "..., master_weights=True)`; any other is refused before it changes a weight. By default it would create its "
    "master weights from the rounded weights; mpguard sets them to the exact values, bit for bit, and frees the "
    "copies. A `state_dict` (so `save_pretrained`, `save_state`, and the Trainer's checkpoints) contains the exact "
    "weights under the keys of the plain model, and can be loaded with or without mpguard; a resumed run continues "
    "bit for bit. `mpguard.revert` gives plain layers with exact weights. Under DDP, all ranks start with the exact "
    "weights of rank 0.", "",
    "Call `mpguard.convert` before DDP; `mpguard.activate` and `mpguard launch` do so. Code that reads "
    "`model.parameters()` gets rounded values: an average of weights must read `state_dict()`. Under FSDP and "
    "DeepSpeed such parameters are refused; FSDP2 has torchao's float8 all-gather.",
)  # fmt: skip


def page(result: dict[str, Any]) -> str:
    """Return docs/gpu.md: what was proven on a GPU, what it means, several GPUs, and what `compile: auto` rests on."""
    found = result["cells"]
    states = Counter(cell["state"] for cell in found)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "mpguard")
    sections = [line for title, path in PARALLEL.items() for line in (*_parallel(title, path), "")]
    lines = [
        "# FP8 on a real GPU", "",
        "<!-- written by `python benchmarks/gpu_matrix.py --page` from benchmarks/results/gpu_matrix.json -->", "",
        f"{states['proven']} combinations of framework, strategy and recipe trained 103 steps each through mpguard and "
        f"were proven ({result['hardware']}); {states['refused']} were refused before training. None ran in "
        "another precision.", "",
        f"Measured on {result['date']} with {versions}. Accelerate and the Trainer ran under `mpguard launch`, own "
        "loops under `torchrun -m mpguard.run`, each with an mp.yaml from `mpguard init`.", "",
        "Proven means, for each cell: the proof of `mpguard launch` has the verdict `in force` (the recipe during the "
        "forward pass has every field of the policy); every trainable parameter has changed; master weights are FP32, "
        "and gradients are reduced in FP32; all matmuls of the converted layers run as FP8 kernels, by the kernels' "
        "names; and over steps 81 to 100 the loss is within 1 % of the BF16 run with the same seed (2 % for delayed "
        "scaling). The model is a small Llama of four blocks, whose output head stays in BF16.", "",
        *_summary(found), "",
        "[All combinations, with the share of FP8 and the distance of the loss, and the reasons of what was "
        "refused](gpu_tables.md).", "", *sections, *KEPT, "", *_compiled(json.loads(COMPILED.read_text("utf-8"))),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def tables(result: dict[str, Any]) -> str:
    """Return docs/gpu_tables.md: each combination that was proven or refused."""
    found = result["cells"]
    frameworks = list(dict.fromkeys(cell["framework"] for cell in found))
    strategies = list(STRATEGIES)
    lines = [
        "# FP8 on a real GPU: all combinations", "",
        "<!-- written by `python benchmarks/gpu_matrix.py --page` from benchmarks/results/gpu_matrix.json -->", "",
        "The share of matmul time in FP8 kernels, and the distance of the loss from BF16. A small model spends more of "
        "its time outside of FP8 than a large one. What was measured, and what proven means: "
        "[FP8 on a real GPU](gpu.md).", "",
    ]  # fmt: skip
    for framework in frameworks:
        lines += [f"## {framework}", "", *_table(_cells(found, framework, strategies), strategies), ""]
    lines += [
        "## Two GPUs", "",
        "Each rank has its own part of the batch. With delayed scaling they ended with the same scales, here and "
        "under DDP: maxima are reduced across them.", "",
    ]  # fmt: skip
    for framework in frameworks:
        if own := _cells(found, framework, SHARDED):
            lines += [f"### {framework}", "", *_table(own, list(SHARDED)), ""]
    if varied := [cell for cell in found if cell.get("variant")]:
        lines += [
            "### Activation checkpointing, LoRA, gradient accumulation", "",
            "With accelerate. LoRA trains adapters in all Linear layers of the blocks and the output head; the other "
            "weights are frozen.", "",
            *_table(varied, list(dict.fromkeys(map(_place, varied)))), "",
        ]  # fmt: skip
    quoted = "Reasons are quoted as they were printed in this run; the wording of messages may have changed since."
    lines += ["## Refused", "", quoted, "", "| recipe | where | reason |", "| --- | --- | --- |"]
    refused: dict[str, list[dict[str, Any]]] = {}
    for cell in found:
        if cell["state"] == "refused":
            refused.setdefault(_recipe(cell), []).append(cell)
    for recipe, where in refused.items():
        reason = min((cell["reason"] for cell in where), key=len)  # some routes name the place too
        lines.append(
            f"| {recipe} | {_places(where, frameworks, strategies)} | {' '.join(reason.split()).replace('|', '/')} |"
        )
    if left := result["unmeasured"]:
        lines += ["", "## Not measured yet", "", "For want of time on a machine with two GPUs:", ""]
        lines += [f"- {name}" for name in left]
    return "\n".join(lines) + "\n"


#: What the programs of gpu_programs/parallel.py are called. MESH: how the GPUs are divided.
NAMES = {
    "ddp": "DDP", "fsdp2": "FSDP2", "hsdp": "HSDP (FSDP2, MESH)", "tp": "tensor and sequence parallel",
    "fsdp_tp": "tensor parallel in FSDP2 (MESH)", "cp": "context parallel in FSDP2 (MESH)", "pp": "pipeline (GPipe)",
    "pp_fsdp": "pipeline (1F1B) of FSDP2 (MESH)", "ep": "expert parallel, DDP for the rest",
}  # fmt: skip


def _parallel(title: str, path: Path) -> list[str]:
    """Return the section about each kind of parallelism on several GPUs. path: of the result."""
    result = json.loads(path.read_text("utf-8"))
    found = {(row["program"], row["recipe"]): row for row in result["rows"]}
    recipes = list(dict.fromkeys(recipe for _, recipe in found))
    states = Counter(row["state"] for row in result["rows"])
    others = "; ".join(f"{number} {state}" for state, number in states.items() if state != "proven")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "mpguard")
    lines = [
        f"## {title}", "",
        f"Loops of one's own of each kind of parallelism on {result['gpus']} x {result['device']}, {result['cores']} "
        f"cores, {result['date']}, {versions}: a Llama-like model of 120 million parameters, 40 steps (`python "
        f"benchmarks/parallel.py`, [{path.name}](../benchmarks/results/{path.name})). "
        f"{states['proven']} of {len(found)} are proven to the end{f'; {others}' if others else ''}: each had "
        f"{result['limit_s']:.0f} s, and {result['at_once']} ran at the same time, so that the seconds of the first "
        "step, with compilation, are an upper bound.", "",
        f"| program | {' | '.join(f'`{recipe}`' for recipe in recipes)} |", f"| --- |{' --- |' * len(recipes)}",
    ]  # fmt: skip
    for program in dict.fromkeys(program for program, _ in found):
        cells = [_parallel_cell(found[program, recipe]) for recipe in recipes]
        name = NAMES[program].replace("MESH", f"{result['gpus'] // 2} x 2")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _parallel_cell(row: dict[str, Any]) -> str:
    """Return the state of a row, its computation, and the seconds of its first step."""
    first = f", first step {row['first_step_s']:.0f} s" if "first_step_s" in row else ""
    return f"{row['state']}: {row['rows'].get('compute', '')}{first}"


def _summary(found: list[dict[str, Any]]) -> list[str]:
    """Return a table of how many combinations of each framework were proven and refused, and their largest distance."""
    lines = ["| framework | proven | refused | farthest from the loss of BF16 |", "| --- | --- | --- | --- |"]
    for framework in dict.fromkeys(cell["framework"] for cell in found):
        own = [cell for cell in found if cell["framework"] == framework]
        proven = [cell for cell in own if cell["state"] == "proven"]
        farthest = max(cell["gap"] for cell in proven)
        lines.append(f"| {framework} | {len(proven)} | {len(own) - len(proven)} | {100 * farthest:.2f} % |")
    return lines


def _cells(found: list[dict[str, Any]], framework: str, places: Sequence[str]) -> list[dict[str, Any]]:
    """Return the cells of a framework in some places, without those of variants."""
    return [
        cell for cell in found if cell["framework"] == framework and _place(cell) in places and not cell.get("variant")
    ]


def _places(cells: list[dict[str, Any]], frameworks: list[str], strategies: list[str]) -> str:
    """Return the places of cells as a short text."""
    found = {name: [_place(cell) for cell in cells if cell["framework"] == name] for name in frameworks}
    alike = {tuple(places) for places in found.values()}
    if len(alike) == 1:
        return "everywhere" if len(min(alike)) == len(strategies) else f"{', '.join(min(alike))}"
    return ", ".join(f"{cell['framework']}, {cell['strategy']}" for cell in cells)


def _compiled(result: dict[str, Any]) -> list[str]:
    """Return the section about torch.compile: the time of a step, and what `auto` chooses."""
    sizes = result["milliseconds"]
    columns = [(size, how) for size in sizes for how in ("eager", "compiled")]
    recipes = list(dict.fromkeys(recipe for rows in sizes.values() for recipe in rows))
    lines = [
        "## compile: auto", "",
        "`compile: auto`, the default, is on for torchao, whose casts cost more than its matmuls gain unless they "
        "are compiled; it is off for delayed scaling, which Transformer Engine refuses under torch.compile (a model "
        "that is compiled nevertheless is refused); for the other recipes the script decides, since compilation "
        "makes wide layers a little faster and narrow ones slower. With an `Accelerator`, so in the Trainer too, "
        "accelerate compiles; in a loop of your own, and by `mpguard.convert`, the model is compiled in place: "
        "objects, names and checkpoints remain, and what the script compiles itself is left unchanged. The choice is "
        "printed, and whether compiled code ran is a row of the proof. All engines were proven compiled ([the "
        "tables](gpu_tables.md)), DDP with torchao too. A model with more than 12 blocks of one class and size is "
        "compiled block by block, in place, also with an `Accelerator`: equal blocks share their code, which is "
        "compiled once ([what it "
        "brings](fp8.md#what-it-brings)). To have one graph, call `torch.compile(model)` in the script.", "",
        f"Milliseconds of a training step on one {result['hardware']}, layers converted by mpguard, FP32 weights, BF16 "
        "autocast, AdamW (benchmarks/results/compile_auto.json):", "",
        f"| recipe | {' | '.join(', '.join(column) for column in columns)} |", f"| --- {'| --- ' * len(columns)}|",
    ]  # fmt: skip
    for recipe in recipes:
        own = (str(sizes[size].get(recipe, {}).get(how, "")) for size, how in columns)
        lines.append(f"| {recipe} | {' | '.join(own)} |")
    batches = "; ".join(
        f"{size}: {each['blocks']} blocks, {each['batch'][0]} x {each['batch'][1]} tokens"
        for size, each in result["sizes"].items()
    )
    return [*lines, "", f"({batches}.)"]


def _place(cell: dict[str, Any]) -> str:
    return f"{cell['strategy']}, {cell['gpus']} GPUs" if cell["gpus"] > 1 else str(cell["strategy"])


def _recipe(cell: dict[str, Any]) -> str:
    recipe = f"{cell['backend']} {cell['recipe']}" if cell["backend"] else str(cell["recipe"])
    return f"{recipe}, {cell['variant']}" if cell.get("variant") else recipe


def _table(own: list[dict[str, Any]], strategies: list[str]) -> list[str]:
    rows: dict[str, dict[str, str]] = {}
    for cell in own:
        rows.setdefault(_recipe(cell), {})[_place(cell)] = _entry(cell)
    head = [f"| recipe | {' | '.join(strategies)} |", f"| --- {'| --- ' * len(strategies)}|"]
    return head + [
        f"| {recipe} | {' | '.join(row.get(strategy, '') for strategy in strategies)} |" for recipe, row in rows.items()
    ]


def _entry(cell: dict[str, Any]) -> str:
    if cell["state"] != "proven":
        return str(cell["state"])
    share = f"{100 * cell['fp8_share']:.0f} % FP8, " if cell["backend"] else ""
    return f"{share}{100 * cell['gap']:.2f} %" if cell["recipe"] != "bf16" else f"loss {cell['loss']:.3f}"
