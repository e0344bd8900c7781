"""Explain a run before it starts: each precision setting in force, where it comes from, and what it overrides.

mpguard explain mp.yaml train.py                 as `mpguard launch --config mp.yaml train.py` runs it
mpguard explain mp.yaml train.py --stock         the same without mpguard
mpguard explain run.sh                           the launch line of a shell script, Makefile or README
mpguard explain --launch "accelerate launch --mixed_precision fp16 train.py"
mpguard explain mp.yaml --live proof.json        what a run did, by its proof
mpguard explain axolotl.yml                      a config of axolotl, LLaMA-Factory, Megatron Bridge, NeMo 1.x

The files are read, never imported or run; torch is not needed. FILE is accelerate's config, a DeepSpeed
JSON, a Python script, or a file with a launch line, in any order. Exit status: 0 explained, 1 the run
would stop before it trains (or the proof failed), 2 a file cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpguard.core.console import Line, print_message, printable, rich_console, use_color, write_lines


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE", help="mp.yaml, ds_config.json, train.py, run.sh")
    parser.add_argument("--launch", metavar="COMMAND", help="the launch line, instead of a file with it")
    parser.add_argument("--stock", action="store_true", help="explain the run without mpguard, by accelerate alone")
    parser.add_argument(
        "--gpu", metavar="NAME", help="the GPU of the run, such as a100 or sm_90 (default: one that can run every mode)"
    )
    parser.add_argument("--live", type=Path, metavar="FILE", help="a proof (`mpguard launch --proof-json FILE`)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


def run(options: argparse.Namespace) -> int:
    from mpguard import explain
    from mpguard.cli.hook import installed
    from mpguard.explain.live import read_proof, with_proof
    from mpguard.policy import hardware

    proof = read_proof(options.live) if options.live is not None else None
    machine = hardware.named(options.gpu) if options.gpu else None
    paths = list(options.paths)
    if proof is not None and not paths and options.launch is None and Path(str(proof.get("config"))).is_file():
        paths = [Path(str(proof["config"]))]
    if proof is not None and not paths and options.launch is None:
        found = explain.Explanation("proof", ())
    elif options.launch is None and (config := explain.trainer_config(paths)) is not None:
        found = explain.explain_config(config)
    else:
        found = explain.explain(
            explain.gather(paths, options.launch, stock=options.stock, hooked=bool(installed())), machine
        )
    if proof is not None:
        found = with_proof(found, proof, options.live)
    if options.format == "json":
        print(json.dumps(found.as_json(), indent=2, default=str))
    else:
        _print(found)
    for reason in found.stops:
        print_message(f"the run stops: {reason}" if proof is None else reason)
    return int(bool(found.stops))


def _print(found: Any) -> None:
    """Print an explanation: a tree on a terminal, indented lines in a pipe."""
    if use_color(sys.stdout):
        _print_tree(found)
    else:
        write_lines(_lines(found))


def _print_tree(found: Any) -> None:
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(printable(found.title), "bold"), guide_style="dim")
    branch = tree
    for depth, line in _rows(found):
        text = Text.assemble(*((piece, style) for piece, style in line))
        if depth == 0:
            branch = tree.add(text)
        else:
            branch.add(text)
    rich_console(sys.stdout).print(tree, soft_wrap=True)


def _lines(found: Any) -> Iterator[Line]:
    yield [(printable(found.title), "")]
    for depth, line in _rows(found):
        yield [("  " * (depth + 1), ""), *line]


def _rows(found: Any) -> Iterator[tuple[int, Line]]:
    """Yield the lines below the title, with their depth."""
    width = max((len(f"{each.key} = {_shown(each.value)}") for each in found.settings), default=0)
    for each in found.settings:
        text = f"{each.key} = {_shown(each.value)}"
        yield 0, [(text, "bold"), (" " * (min(width, 60) - len(text)) + "  ", ""), (_place(each.origin), "cyan")]
        for other in each.shadowed:
            if each.has_value_of(other):
                yield 1, [("same value", "dim"), (f"  {_place(other.origin)}", "cyan")]
                continue
            yield 1, [(f"not {_shown(other.value)}", "yellow"), (f"  {_place(other.origin)}", "cyan"),
                      (f": {printable(other.why)}", "dim")]  # fmt: skip
    if found.unread:
        yield 0, [("nothing reads", "bold")]
    for each in found.unread:
        yield 1, [(printable(each.key), "yellow"), (f"  {_place(each.origin)}", "cyan"),
                  (f": {printable(each.why)}", "dim")]  # fmt: skip
    for note in found.notes:
        yield 0, [(f"note: {printable(note)}", "")]


def _shown(value: Any) -> str:
    from mpguard.targets.settings import show

    return printable(show(value) if not isinstance(value, (list, dict)) else json.dumps(value, default=str))


def _place(origin: Any) -> str:
    return printable(str(origin))
