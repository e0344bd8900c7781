"""List the precision recipes, or show one recipe and what it becomes in a framework.

mpguard recipes                          all recipes, and the reason if one cannot run here
mpguard recipes bf16_mixed               its fields, and its arguments for every target
mpguard recipes bf16_mixed --for fsdp2   the object or config for one target
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mpguard import targets
from mpguard.core.console import columns, print_message, rich_console, wrapped, write_lines
from mpguard.core.errors import MissingExtra, NotCarried, PolicyError
from mpguard.policy import hardware
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import recipe, recipes
from mpguard.targets.capabilities import CONVERTER_FIELDS
from mpguard.targets.plugin import Plugin
from mpguard.targets.settings import ABSENT, show

#: The least room for the reason why a recipe cannot run here; below it the table becomes a list.
_NARROWEST_REASON = 24
#: Objects whose text is that of their arguments alone, by target: torch takes seconds to import for it.
_WRITTEN = {"fsdp2": "MixedPrecisionPolicy"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="NAME", help="show this recipe with all its fields")
    parser.add_argument(
        "--for", dest="target", metavar="TARGET", help="show the recipe for this target: accelerate, fsdp2, ..."
    )
    parser.add_argument("--strategy", metavar="STRATEGY", help=f"with --for: {', '.join(targets.STRATEGIES)}")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")


def run(options: argparse.Namespace) -> int:
    if options.recipe is None:
        for flag, value in (("--for", options.target), ("--strategy", options.strategy)):
            if value is not None:
                raise PolicyError(f"{flag} {value}: a recipe is needed. Name one: mpguard recipes NAME {flag} {value}")
        facts = [_facts(name) for name in recipes()]
        if options.format == "json":
            _json({"machine": str(hardware.detect()), "recipes": facts})
        else:
            _table(facts)
        return 0
    policy = recipe(options.recipe)
    targets.check_strategy(options.strategy)
    if options.target is None:
        outcomes = {name: _outcome(each, policy, options.strategy) for name, each in targets.plugins().items()}
        if options.format == "json":
            _json({"recipe": _facts(options.recipe), "targets": outcomes})
        else:
            _page(_facts(options.recipe), outcomes)
        return 0
    written = _WRITTEN.get(options.target, "") if options.format == "text" else ""
    built = _built(targets.get(options.target), policy, options.strategy, written)
    if options.format == "json":
        _json({"recipe": policy.name, "target": options.target, "strategy": options.strategy, **built})
    else:
        _show_built(targets.get(options.target), built)
    return 0


def _json(facts: Mapping[str, Any]) -> None:
    print(json.dumps({"version": 1, **facts}, indent=2))


def _facts(name: str) -> dict[str, Any]:
    """Return the row of a recipe in the table, as plain data."""
    name = name.replace("-", "_")
    policy = recipe(name)
    reason = refusal = hardware.detect().refuses(policy)
    if name == "auto" and refusal is None:
        reason = ", ".join(hardware.best())
    low = f"{'/'.join(policy.backends)} {policy.low_bit_recipe}" if policy.low_bit_recipe else None
    return {
        "name": name,
        "summary": (inspect.getdoc(recipes()[name]) or "").split("\n\n")[0].replace("\n", " "),
        "compute": "tf32" if policy.tf32 and not policy.low_precision else policy.compute_dtype.short,
        "fp8": low,
        "master": policy.master_dtype.short,
        "reduce": policy.reduce_dtype.short,
        "here": refusal is None,
        "reason": reason,
        "fields": policy.settings(),
    }


def _here(facts: Mapping[str, Any]) -> str:
    word = "yes" if facts["here"] else "no"
    return f"{word}: {facts['reason']}" if facts["reason"] else word


def _table(facts: Sequence[Mapping[str, Any]]) -> None:
    header = ("recipe", "compute", "fp8", "master", "reduce", "here")
    rows = [(*(each[key] or "-" for key in ("name", *header[1:5])), _here(each)) for each in facts]
    width = columns()
    fixed = sum(max(map(len, column)) + 2 for column in list(zip(header, *rows, strict=True))[:-1])
    if width is not None and width < fixed + _NARROWEST_REASON:
        for row, each in zip(rows, facts, strict=True):
            fp8 = f", FP8 {row[2]}" if each["fp8"] else ""
            what = f"{row[1]}{fp8}; master {row[3]}, reduce {row[4]}; here: {row[5]}"
            style = "" if each["here"] else "dim"
            write_lines([[(row[0], "bold")]])
            indented = textwrap.wrap(what, width, initial_indent="  ", subsequent_indent="  ")
            write_lines([[(line, style)] for line in indented])
    elif width is not None:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in header:
            table.add_column(title, no_wrap=title != "here", overflow="fold")
        for row, each in zip(rows, facts, strict=True):
            table.add_row(*row, style=None if each["here"] else "dim")
        rich_console(sys.stdout).print(table)
    else:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    hint = "`mpguard recipes NAME` shows a recipe, `mpguard recipes NAME --for TARGET` its form in a framework."
    print("\n" + (textwrap.fill(hint, width) if width is not None else hint))


def _outcome(target: Plugin, policy: Policy, strategy: str | None) -> dict[str, Any]:
    """Return the arguments of a target for a policy, computed without the target's library."""
    try:
        arguments = target.build_arguments(policy, strategy)
    except PolicyError as error:
        return {"refused": str(error).removeprefix(f"{target.name}: ")}
    return {"arguments": arguments, "not_carried": target.not_carried(policy, strategy)}


def _page(facts: Mapping[str, Any], outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    print(_wrapped(f"{facts['name']}: {facts['summary']}", "") + "\n")
    for field, value in facts["fields"].items():
        print(f"  {field} = {show(value)}")
    print("\n" + _wrapped(f"Runs here: {_here(facts)}", "") + "\n")
    width = max(map(len, outcomes))
    for name, outcome in outcomes.items():
        if "refused" in outcome:
            print(_wrapped(f"refused: {outcome['refused']}", f"  {name:{width}}  "))
            continue
        arguments = outcome["arguments"].items()
        text = ", ".join(f"{key}={show(value)}" for key, value in arguments if value is not None)
        print(_wrapped(text, f"  {name:{width}}  "))
        missing = [field for field in outcome["not_carried"] if field not in CONVERTER_FIELDS]
        if missing:
            print(_wrapped(f"not supported: {', '.join(missing)}", f"  {'':{width}}  "))
    own = [field for field in facts["fields"] if field in CONVERTER_FIELDS]
    if own:
        print()
        print(_wrapped(f"applied by mpguard itself in runs that it launches or activates: {', '.join(own)}", ""))


def _wrapped(text: str, label: str) -> str:
    width = min(120, columns() or 120)
    return textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label), break_long_words=False)


def _built(target: Plugin, policy: Policy, strategy: str | None, written: str = "") -> dict[str, Any]:
    """Return a policy as a target's object if its library is installed, and its settings. Raises `PolicyError`.

    written: the class of an object that is written without its library.
    """
    missing, text = None, _text_of(written, target.build_arguments(policy, strategy)) if written else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotCarried)  # listed below
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)  # the libraries log while they are imported
        try:
            if not written:
                built = targets.build(policy, target.name, strategy)
                text = None if isinstance(built, dict) else repr(built)
        except MissingExtra as error:
            missing = str(error)
        finally:
            logging.disable(disabled)
    settings = target.settings(policy, strategy)
    return {
        "object": text,
        "arguments": target.build_arguments(policy, strategy),
        "settings": {key: setting.value for key, setting in settings.items() if setting.value is not ABSENT},
        "absent": {key: setting.reason for key, setting in settings.items() if setting.value is ABSENT},
        "missing": missing,
        "not_carried": [
            {"field": field, "value": policy.format_field(field), "carriers": targets.carriers(field)}
            for field in target.not_carried(policy, strategy)
        ],
    }


def _text_of(name: str, arguments: Mapping[str, Any]) -> str:
    """Return an object of torch as Python shows it, from its arguments."""

    def shown(value: Any) -> str:
        dtype = Dtype.spelled(value) if isinstance(value, str) else None
        return repr(value) if dtype is None else f"torch.{dtype.torch_name}"

    return f"{name}({', '.join(f'{key}={shown(value)}' for key, value in arguments.items())})"


def _comment(text: str) -> None:
    """Print a comment, of several lines where the terminal is narrow."""
    width = columns()
    print("\n".join(f"# {line}" for line in wrapped(text, 0, width and width - 2).split("\n")))


def _show_built(target: Plugin, built: Mapping[str, Any]) -> None:
    if built["missing"]:
        print(wrapped(built["missing"], 0, columns()) + "\nThe arguments would be:")
    if built["object"]:
        print(wrapped(built["object"], 4, columns()))
    elif target.name == "deepspeed":
        print(json.dumps(built["arguments"], indent=2))
    else:
        _comment((inspect.cleandoc(target.doc) or target.name).splitlines()[0])
        for name, value in built["arguments"].items():
            print(wrapped(f"{name}={value!r}", 4, columns()))
    if target.name == "accelerate":
        print("# In the config file")
        for key, value in built["settings"].items():
            print(wrapped(f"{key}: {show(value)}", 4, columns()))
        for key, why in built["absent"].items():
            line = f"{key}: (absent)" + (f" # {why}" if why else "")
            if (columns() or len(line)) < len(line):
                _comment(why)
                line = f"{key}: (absent)"
            print(line)
    for each in built["not_carried"]:
        print_message(str(NotCarried(each["field"], each["value"], target.name, each["carriers"])))
