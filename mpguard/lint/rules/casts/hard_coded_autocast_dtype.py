from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Diagnostic,
    Facts,
    Good,
    Note,
    Ref,
    Rule,
    any_of,
    dotted,
    dtype_options,
    library_names,
)


class HardCodedAutocastDtype(Rule):
    """The dtype of an autocast is a literal in a script that has an option for the precision.

    ## What it does
    Reports `torch.autocast(..., dtype=torch.bfloat16)` with a literal dtype if the same file defines an option for it
    (argparse, click, a field of a settings class: `dtype`, `precision`, `mixed_precision`, `amp_dtype`) and the region
    does not depend on that option.

    ## Why is this bad
    The option has no effect on the region: a run with `--precision fp32` computes in BF16.

    ## Known limits
    Preview: the option may be meant for the weights, or for export, only. Silent if the region, or the function that
    holds it, is under a condition that names the option.
    """

    code, name = "MPG106", "hard-coded-autocast-dtype"
    severity = "info"
    preview = True
    message = "`{expr}` has a literal dtype, but the script has the option `{option}`"
    help = "pass the option's dtype to the autocast"
    triggers = (any_of(b"autocast("), any_of(b"dtype", b"precision"), any_of(b"float16", b"half"))
    yields_to = ("MPG105", "MPG310")
    examples = (
        Bad(
            """\
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
args = parser.parse_args()

def train(model, loader):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):  # !
            loss = model(x).sum()
        loss.backward()
"""
        ),
        Good(
            """\
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
parser.add_argument("--dtype", default="float16")
args = parser.parse_args()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

def train(model, loader):
    for x in loader:
        with torch.autocast("cuda", dtype=DTYPES[args.precision]):
            loss = model(x).sum()
        loss.backward()
        if args.precision == "bf16":
            with torch.autocast("cuda", dtype=torch.bfloat16):
                model(x)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            model(x)
        with torch.autocast("cuda", dtype=torch.float32):
            model(x)
        with {"bf16": torch.autocast("cuda", dtype=torch.bfloat16), "fp32": nullcontext()}[args.precision]:
            model(x)
"""
        ),
        Good(
            """\
import torch

def train(model, loader):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        options = [option for option in dtype_options(facts) if not option.constant] if facts.events("autocast") else []
        for event in facts.events("autocast") if options else ():
            given = event.call.argument(1, "dtype")
            low = (
                given is not None
                and library_names.DTYPES.get(f"torch.{dotted(given).rsplit('.', 1)[-1]}") in HALF_DTYPES
            )
            if not low or not dotted(given).count("."):
                continue
            if isinstance(facts.parent(event.call.node), cst.DictElement):  # `{"bf16": autocast(...)}[args.precision]`
                continue
            root = facts.resolve(dotted(given).split(".", 1)[0], event.scope, event.order)
            if not all(isinstance(each.atom, Ref) and each.atom.path == "torch" for each in root):
                continue
            path = facts.called_path(event.call)
            flags = event.guard.joined(facts.enabled(event.call, path)).flags()
            names = {option.name for option in options}
            if any(name in flag for flag in flags for name in names) or "enabled" in event.call.keywords:
                continue
            notes = (Note("the option", options[0].span),)
            yield self.at(event, expr=facts.short(event.call.node), option=options[0].name, notes=notes)
