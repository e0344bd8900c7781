"""Show what this machine can train in: GPU, driver, libraries, which recipes work here, and for the others why not.

mpguard doctor                 problems, and a table of recipes and strategies
mpguard doctor --fix-hints     with the command, or the setting, that removes each problem
mpguard doctor --fast          without importing libraries and computing small matmuls
mpguard doctor --recipe NAME   one recipe, with the reason for each strategy

Libraries are imported, and small matmuls computed, in child processes with a time limit: a crash or
a hang is a row of the report. Needs neither torch nor a GPU. Exit status: 0 no problem, 1 problems were
found, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mpguard.core.console import Line, columns, folded, printable, write_lines

if TYPE_CHECKING:
    from mpguard.doctor import Diagnosis, RecipeCell

#: Columns that an answer has at least beside its recipe.
_NARROWEST = 50


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", metavar="NAME", help="only this recipe, with the reason for each strategy")
    parser.add_argument("--fix-hints", action="store_true", help="print the command or setting that removes a problem")
    parser.add_argument("--fast", action="store_true", help="read versions only: import nothing, compute nothing")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


def run(options: argparse.Namespace) -> int:
    from mpguard.doctor import diagnose
    from mpguard.policy.recipes import recipe

    if options.recipe is not None:
        recipe(options.recipe)  # raises for an unknown name
    if not options.fast and options.format == "text" and sys.stderr.isatty():
        print("Importing libraries and computing small matmuls ...", file=sys.stderr)
    report = diagnose(probe=not options.fast)
    if options.format == "json":
        print(json.dumps(report.as_json(), indent=2))
    else:
        write_lines(_lines(report, options.recipe, options.fix_hints))
    return int(bool(report.problems))


def _lines(report: Diagnosis, recipe: str | None, hints: bool) -> Iterator[Line]:
    machine = report.machine
    other = machine.get("accelerator")
    gpu = machine["gpu"] or (other["shown"] if other else "none" if not machine["gpus"] else "none visible")
    count = f"{machine['visible_gpus']} x " if machine["visible_gpus"] > 1 else ""
    rows = [
        ("GPU", f"{count}{gpu}"),
        ("driver", _with_cuda(machine["driver"] or "none", machine["driver_cuda"])),
        ("torch", _with_cuda(report.packages.get("torch", "not installed"), machine["torch_cuda"])),
        *((name, str(machine[name])) for name in ("cudnn", "nccl") if name in machine),
        *((name, version) for name, version in report.packages.items() if name not in ("torch", "mpguard")),
    ]
    width = max(len(name) for name, _ in rows)
    for label, value in rows:
        yield [(f"{label:{width}}  ", "bold"), (printable(value), "")]
    yield [("", "")]
    if other:
        note = "shown is what torch computes and accelerate distributes here; mpguard is tested on NVIDIA GPUs and CPUs"
        yield from folded([("note: ", "bold"), (note, "")], 6, columns())
    for library in report.libraries.values():
        if (line := library.line()) is not None:
            yield from folded([("library: ", "bold yellow"), (printable(line), "")], 9, columns())
    for problem in report.problems:
        yield from folded([("problem: ", "bold red"), (printable(problem.what), "")], 9, columns())
        if hints:
            yield [("    fix: ", "bold green"), (printable(problem.fix), "")]
    if report.problems:
        yield [("", "")] if hints else [("`--fix-hints` prints what to do.", "dim")]
        if not hints:
            yield [("", "")]
    name = recipe.replace("-", "_") if recipe else None
    yield from _recipe(report, name) if name else _table(report.cells)


def _with_cuda(version: str, cuda: str | None) -> str:
    return f"{version}, CUDA {cuda}" if cuda else version


def _recipe(report: Diagnosis, name: str) -> Iterator[Line]:
    for cell in report.cells:
        if cell.recipe == name:
            mark = [("yes", "green")] if cell.works else [("no", "red")]
            yield [(f"{cell.recipe}  {cell.backend:8} {cell.strategy:16} ", ""), *mark,
                   (f"  {printable(cell.reason)}" if cell.reason else "", "")]  # fmt: skip


def _table(cells: Sequence[RecipeCell]) -> Iterator[Line]:
    """Yield a line for each recipe and backend: the strategies that work, or the reason that none does.

    On a narrow terminal the answer is below the recipe.
    """
    rows: dict[tuple[str, str], list[RecipeCell]] = {}
    for cell in cells:
        rows.setdefault((cell.recipe, cell.backend), []).append(cell)
    names, backends = (max(len(key[column]) for key in [*rows, ("", "backend")]) for column in (0, 1))
    width, indent = columns(), names + backends + 4
    stacked = width is not None and width < indent + _NARROWEST
    yield [(f"{'recipe':{names}}  {'backend':{backends}}{'' if stacked else '  works here'}", "bold")]
    for (recipe, backend), found in rows.items():
        label = f"{recipe:{names}}  {backend:{backends}}  "
        if stacked:
            yield [(label.rstrip(), "")]
            label, indent = " " * 4, 4
        for answer in _answers(found):
            yield from folded([(label, ""), *answer], indent, width)
            label = " " * indent


def _answers(cells: Sequence[RecipeCell]) -> Iterator[Line]:
    """Yield the strategies that work for a recipe, and the others by reason; one reason if none does."""
    working = [cell.strategy for cell in cells if cell.works]
    if not working:
        yield [("no: ", "red"), (printable(cells[0].reason), "")]
        return
    yield [("yes: ", "green"), (", ".join(working), "")]
    others: dict[str, list[str]] = {}
    for cell in cells:
        if not cell.works:
            others.setdefault(cell.reason, []).append(cell.strategy)
    for reason, strategies in others.items():
        yield [(f"not {', '.join(strategies)}: {printable(reason)}", "dim")]
